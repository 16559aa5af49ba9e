// Draw a figure as SVG: lines with bands, bars with whiskers, an accuracy matrix, panels of an embedding.
"use strict";
const COLOURS = 8;
const SYMBOLS = ["circle", "triangle", "square", "diamond", "star", "cross", "wye"];
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];
const PAPER_DASH = "5 4";
const NINE_SHARES = [0, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999, 0.99999];
const LOWEST_ERROR = 1e-5;
const INK = "var(--ink)";

// Colour and marker of a series: no two of the first 56 share both.
function styleOf(place) {
  return {
    colour: `var(--s${place % COLOURS})`,
    symbol: SYMBOLS[place % SYMBOLS.length],
    dash: DASHES[Math.floor(place / COLOURS) % DASHES.length],
  };
}

function nines(value, unit) {
  return -Math.log10(Math.max(1 - (unit === "%" ? value / 100 : value), LOWEST_ERROR));
}

// Heights as they are drawn, and the options of their scale.
function verticalScale(figure, values) {
  const { scale, unit, label } = figure.y;
  const title = `↑ ${label}${unit ? ` (${unit})` : ""}`;
  if (scale === "nines") {
    const heights = values.map((value) => nines(value, unit));
    const [low, high] = [Math.min(...heights), Math.max(...heights)];
    const pad = Math.max(0.06 * (high - low), high - low < 0.5 ? 0.25 : 0.05);
    const apart = (high - low + 2 * pad) / 14;
    const ticks = NINE_SHARES.map((share) => nines(share, "")).filter((tick) => tick >= low - pad && tick <= high + pad)
      .reduceRight((kept, tick) => (kept.length && kept[0] - tick < apart ? kept : [tick, ...kept]), []);
    const tickFormat = (height) => {
      const share = 1 - 10 ** -height;
      return unit === "%" ? String(Number((100 * share).toPrecision(6))) : String(Number(share.toPrecision(6)));
    };
    return {
      height: (value) => nines(value, unit),
      options: { label: title, domain: [low - pad, high + pad], ticks, tickFormat, grid: true },
    };
  }
  const type = scale === "log" && Math.min(...values) > 0 ? "log" : "linear";
  const tickFormat = type === "log" ? shortNumber : undefined;
  const ticks = type === "log" ? { ticks: logTicks([Math.min(...values), Math.max(...values)]) } : {};
  return { height: (value) => value, options: { label: title, type, grid: true, nice: true, tickFormat, ...ticks } };
}

function horizontalScale(figure, entries) {
  const { scale, unit, label } = figure.x;
  const title = `${label}${unit ? ` (${unit})` : ""} →`;
  const xs = [...new Set(entries.map((entry) => entry.x))];
  if (xs.some((x) => typeof x !== "number")) return { label: title, type: "point", domain: xs };
  if (scale === "log" && Math.min(...xs) > 0) {
    const decades = Math.log10(Math.max(...xs) / Math.min(...xs));
    const pad = 10 ** Math.max(0.04 * decades, decades < 0.3 ? 0.2 : 0.05);
    const domain = [Math.min(...xs) / pad, Math.max(...xs) * pad];
    return { label: title, type: "log", domain, grid: true, ticks: logTicks(domain), tickFormat: shortNumber };
  }
  const few = xs.length <= 12 && xs.every(Number.isInteger) ? xs.sort((a, b) => a - b) : undefined;
  return { label: title, nice: !few, ticks: few, tickFormat: few ? (x) => String(x) : undefined };
}

// 20000 -> 20k
function shortNumber(value) {
  return value >= 1000 ? d3.format("~s")(value) : format(value, "");
}

function logTicks([low, high]) {
  const decades = Math.log10(high / low);
  const steps = decades > 3 ? [1] : decades > 1.6 ? [1, 3] : decades > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const step of steps) ticks.push(step * 10 ** power);
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

function tipText(figure, entry) {
  const place = typeof entry.x === "number" ? `${figure.x.label}: ${withUnit(entry.x, figure.x.unit)}` : "";
  const lines = [`${entry.series}${entry.source === OURS ? "" : " (paper)"}`, `${figure.y.label}: ${describeMean(entry, figure.y.unit)}`];
  if (place) lines.push(place);
  if (entry.label) lines.push(entry.label);
  lines.push(entry.source === OURS ? countSeeds(entry) : entry.points[0].note);
  if (entry.n === 1 && entry.points[0].date) lines.push(`${entry.points[0].date.slice(0, 10)} ${entry.points[0].commit}`);
  return lines.filter(Boolean).join("\n");
}

// Drawn anew, with a label of its own, whenever the pointer moves: hidden from screen readers, which have the table.
const tipOptions = { fill: "var(--paper)", stroke: "var(--soft)", textPadding: 8, lineWidth: 26, fontSize: 12, lineHeight: 1.3, ariaHidden: "true" };

function drawLine(figure, entries, place, width) {
  const ys = entries.flatMap((entry) => (entry.sd === null ? [entry.y] : [entry.y - entry.sd, entry.y, entry.y + entry.sd]));
  const { height, options } = verticalScale(figure, ys);
  const drawn = entries.map((entry) => ({
    ...entry, top: height(entry.y + (entry.sd ?? 0)), bottom: height(entry.y - (entry.sd ?? 0)), middle: height(entry.y),
  }));
  const marks = [];
  const curves = d3.groups(drawn, (entry) => entry.series, (entry) => entry.source);
  for (const [series, bySource] of curves) {
    for (const [source, own] of bySource) {
      if (own.every((entry) => typeof entry.x === "number")) own.sort((a, b) => a.x - b.x);
      const { colour, symbol, dash } = styleOf(place.get(series));
      const tag = { ariaLabel: () => `series ${place.get(series)}` };
      const many = own.filter((entry) => entry.sd !== null);
      if (many.length > 1) marks.push(Plot.areaY(many, { x: "x", y1: "bottom", y2: "top", fill: colour, fillOpacity: 0.14, ...tag }));
      else if (many.length) marks.push(Plot.ruleX(many, { x: "x", y1: "bottom", y2: "top", stroke: colour, ...tag }));
      if (own.length > 1 && figure.kind === "line") {
        marks.push(Plot.line(own, {
          x: "x", y: "middle", stroke: colour, strokeWidth: 2, strokeLinejoin: "round",
          strokeDasharray: source === OURS ? dash : PAPER_DASH, strokeOpacity: source === OURS ? 1 : 0.85,
          ariaLabel: () => `series ${place.get(series)} curve`,
        }));
      }
      const fill = source === OURS ? colour : "var(--paper)";
      marks.push(Plot.dot(own, { x: "x", y: "middle", symbol, r: own.length > 16 ? 2.5 : 3.8, fill, stroke: colour, strokeWidth: 1.4, ...tag }));
    }
  }
  const title = (entry) => tipText(figure, entry);
  marks.push(Plot.tip(drawn, Plot.pointer({ x: "x", y: "middle", title, maxRadius: 40, ...tipOptions })));
  const narrow = width < 500;
  return Plot.plot({
    width, height: Math.round(Math.min(Math.max(width * 0.52, 280), 440)), marginLeft: narrow ? 46 : 56, marginBottom: 42,
    marginRight: 16, marginTop: 28, x: horizontalScale(figure, entries), y: { ...options, labelAnchor: "top" }, marks,
  });
}

function drawBars(figure, entries, place, width) {
  const ours = entries.filter((entry) => entry.source === OURS).sort((a, b) => b.y - a.y);
  const names = [...new Set([...ours, ...entries].map((entry) => entry.series))];
  const longest = Math.max(...names.map((name) => name.length));
  const marginLeft = Math.round(Math.min(longest * 6.6 + 14, width * 0.4));
  const letters = Math.max(Math.round((marginLeft - 14) / 6.6), 4);
  const shorten = (name) => (name.length > letters ? `${name.slice(0, letters - 1)}…` : name);
  const runs = ours.filter((entry) => entry.n > 1).flatMap((entry) => entry.points);
  const paper = entries.filter((entry) => entry.source !== OURS);
  const marks = [];
  for (const entry of ours) {
    const tag = { ariaLabel: () => `series ${place.get(entry.series)} curve` };
    marks.push(Plot.barX([entry], { x: "y", y: "series", fill: styleOf(place.get(entry.series)).colour, fillOpacity: 0.75, insetTop: 2, insetBottom: 2, ...tag }));
    if (entry.sd !== null) marks.push(Plot.ruleY([entry], { y: "series", x1: entry.y - entry.sd, x2: entry.y + entry.sd, stroke: INK, strokeWidth: 2 }));
  }
  marks.push(Plot.dot(runs, { x: "y", y: "series", r: 2.5, fill: "var(--paper)", stroke: INK, strokeWidth: 1 }));
  marks.push(Plot.tickX(paper, { x: "y", y: "series", stroke: INK, strokeWidth: 2, strokeDasharray: "3 2" }));
  marks.push(Plot.dot(paper, { x: "y", y: "series", symbol: "diamond", r: 5, fill: "var(--paper)", stroke: INK, strokeWidth: 1.5 }));
  const end = (entry) => entry.y + (entry.sd ?? 0);
  marks.push(Plot.text(ours, { x: (entry) => Math.max(end(entry), 0), y: "series", text: (entry) => describeMean(entry, figure.y.unit, ""), dx: 8, textAnchor: "start", fill: INK }));
  marks.push(Plot.ruleX([0], { stroke: "var(--soft)" }));
  const title = (entry) => tipText(figure, entry);
  marks.push(Plot.tip(entries, Plot.pointerY({ x: "y", y: "series", title, ...tipOptions })));
  marks.push(Plot.axisY({ tickSize: 0, tickFormat: shorten, label: null, fill: INK }));
  const unit = figure.y.unit ? ` (${figure.y.unit})` : "";
  return Plot.plot({
    width, height: 26 * names.length + 66, marginLeft, marginRight: 84, marginTop: 8, marginBottom: 42,
    x: { label: `${figure.y.label}${unit} →`, grid: true, ticks: Math.max(Math.floor((width - marginLeft - 84) / 70), 2) }, y: { domain: names, padding: 0.12 }, marks,
  });
}

function drawMatrix(figure, entries, place, width) {
  const labels = [...new Set(entries.map((entry) => entry.series))];
  const tasks = [...new Set(entries.map((entry) => entry.x))].sort((a, b) => a - b);
  const cell = Math.min((width - 96) / tasks.length, 58);
  const marks = [
    Plot.cell(entries, { x: "x", y: "series", fill: "var(--s0)", fillOpacity: (entry) => 0.04 + 0.5 * (entry.y / 100), inset: 0.5 }),
  ];
  if (cell >= 24) marks.push(Plot.text(entries, { x: "x", y: "series", text: (entry) => entry.y.toFixed(0), fill: INK, fontSize: cell > 34 ? 12 : 10.5 }));
  const title = (entry) => tipText(figure, entry);
  marks.push(Plot.tip(entries, Plot.pointer({ x: "x", y: "series", title, ...tipOptions })));
  return Plot.plot({
    width: Math.round(cell * tasks.length + 96), height: Math.round(Math.max(Math.min(cell, 30), 12) * labels.length + 56),
    marginLeft: 92, marginRight: 4, marginTop: 40, marginBottom: 8,
    x: { domain: tasks, axis: "top", label: figure.x.label, tickSize: 0, ticks: tasks.filter((task) => cell >= 16 || task % 5 === 0) },
    y: { domain: labels, label: null, tickSize: 0, ticks: labels.filter((_, i) => labels.length <= 16 || i % 5 === 0) },
    opacity: { type: "identity" }, marks,
  });
}

// One panel a series, the same classes in the same colours.
function drawEmbedding(figure, points, width) {
  const classes = [...new Set(points.map((point) => point.label))].sort();
  const rank = new Map(classes.map((name, place) => [name, place]));
  const columns = Math.max(Math.floor(width / 288), 1);
  const panel = Math.round(Math.min((width - 16 * (columns - 1)) / columns, 460));
  return d3.groups(points, (point) => point.series).map(([series, own]) => {
    const byClass = d3.groups(own, (point) => rank.get(point.label));
    const marks = byClass.map(([place, some]) => Plot.dot(some, {
      x: "x", y: "y", r: 2.4, fill: styleOf(place).colour, symbol: styleOf(place).symbol, fillOpacity: 0.8,
    }));
    marks.push(Plot.tip(own, Plot.pointer({ x: "x", y: "y", title: (point) => `${point.label}\n${series}`, ...tipOptions })));
    const svg = Plot.plot({ width: panel, height: panel, margin: 6, axis: null, x: { nice: false }, y: { nice: false }, marks });
    return { series, svg };
  });
}

// Children say nothing to a screen reader: the picture has one label, and the table below holds the numbers.
function labelPicture(svg, text) {
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", text);
  for (const part of svg.querySelectorAll("[aria-label], [aria-description]")) {
    const [, place, curve] = /^series (\d+)( curve)?$/.exec(part.getAttribute("aria-label") ?? "") ?? [];
    if (place !== undefined) part.dataset.series = place;
    if (curve) part.dataset.curve = place;
    part.removeAttribute("aria-label");
    part.removeAttribute("aria-description");
  }
  return svg;
}
