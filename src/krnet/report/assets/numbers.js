// What the page holds, decoded; means over seeds; numbers as text.
"use strict";
const OURS = 0;
const REPORT = JSON.parse(document.getElementById("report-data").textContent);
const RUN_FIELDS = ["seed", "data", "method", "commit", "date", "command", "note"];

function decodeFigure(packed) {
  const points = packed.points.map(([series, x, y, source, label, run]) => {
    const point = { series: packed.series[series], x, y, source, label: packed.labels[label] };
    RUN_FIELDS.forEach((field, place) => { point[field] = REPORT.runs[run][place]; });
    return point;
  });
  return { ...packed, points };
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

// One entry for each series, source and place. Runs of other seeds may differ a little in x where a label names the place.
function summarize(points) {
  const groups = new Map();
  for (const point of points) {
    const key = JSON.stringify([point.series, point.source, point.label || point.x]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(point);
  }
  return [...groups.values()].map((own) => {
    const ys = own.map((point) => point.y);
    const { series, source, label } = own[0];
    const x = typeof own[0].x === "number" ? mean(own.map((point) => point.x)) : own[0].x;
    return { series, source, label, x, y: mean(ys), sd: deviation(ys), n: own.length, points: own };
  });
}

function seriesNames(points) {
  return [...new Set(points.map((point) => point.series))];
}

function numSeeds(points) {
  return new Set(points.filter((point) => point.source === OURS).map((point) => point.seed)).size;
}

// "3 seeds", "one seed", "1 to 3 seeds": of the series of a figure.
function describeSeeds(points) {
  const ours = points.filter((point) => point.source === OURS);
  if (ours.length && ours.every((point) => point.seed === null)) return "Single measurements, without a seed.";
  const counts = seriesNames(ours).map((name) => numSeeds(ours.filter((point) => point.series === name)));
  if (!counts.length) return "";
  const [low, high] = [Math.min(...counts), Math.max(...counts)];
  if (high === 1) return "One seed: how far results scatter is not shown.";
  if (low === high) return `Mean and standard deviation of ${high} seeds.`;
  const single = counts.filter((count) => count === 1).length;
  const one = single ? ` ${single} of ${counts.length} series ${single === 1 ? "rests" : "rest"} on one seed.` : "";
  return `Mean and standard deviation of up to ${high} seeds.${one}`;
}

function format(value, unit) {
  if (typeof value !== "number") return String(value);
  if (unit === "%" || unit === "points") return fixed(value, value > 99 && value < 100 ? 2 : 1);
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size === 0 || (size >= 1e-3 && size < 1e4)) return String(Number(value.toPrecision(4)));
  return value.toExponential(2);
}

function withUnit(value, unit) {
  return unit ? `${format(value, unit)} ${unit}` : format(value, unit);
}

// Half up from the decimal digits, as the tables of the documentation: 69.35 is 69.4, which binary fractions make 69.3.
function fixed(value, digits) {
  const scale = 10 ** digits;
  return (Math.round(Number((Math.abs(value) * scale).toPrecision(12))) / scale * Math.sign(value) || 0).toFixed(digits);
}

// The deviation with as many decimals as the mean.
function describeMean(entry, unit, shown = unit) {
  const middle = format(entry.y, unit);
  const decimals = /^-?\d+\.(\d+)$/.exec(middle)?.[1].length ?? 0;
  const spread = entry.sd === null ? "" : ` ± ${fixed(entry.sd, Math.max(decimals, unit === "%" ? 1 : 0))}`;
  return `${middle}${spread}${shown ? ` ${shown}` : ""}`;
}

function countSeeds(entry) {
  if (entry.source !== OURS) return "the paper";
  return entry.n === 1 ? "one seed" : `${entry.n} runs`;
}
