// Put it together: figures are drawn when they come near the window, and again when a filter or the width changes.
"use strict";
const state = readState();
const figures = new Map();
const colourPlaces = new Map(); // of a section: series -> place among the colours

for (const section of REPORT.sections) {
  const places = new Map();
  for (const packed of section.figures) {
    if (packed.kind !== "matrix") for (const name of packed.series) if (!places.has(name)) places.set(name, places.size);
    figures.set(packed.name, { packed, places, hidden: new Set(), pick: "", stale: true, near: false, width: 0 });
  }
}

function summaryText(figure, entries) {
  const kinds = { line: "Line plot", dots: "Dot plot", bars: "Bar chart", matrix: "Heat map", embedding: "Scatter plot" };
  const curves = d3.groups(entries, (entry) => `${entry.series}${entry.source === OURS ? "" : " (paper)"}`);
  const parts = curves.slice(0, 8).map(([name, own]) => {
    return `${name}: ${own.length > 1 ? "at the end " : ""}${describeMean(own[own.length - 1], figure.y.unit)}`;
  });
  const more = curves.length > 8 ? `; and ${curves.length - 8} more` : "";
  return `${figure.title}. ${kinds[figure.kind]} of ${curves.length} series. ${parts.join("; ")}${more}. The numbers stand in the table below.`;
}

function draw(item) {
  const figure = item.figure ?? (item.figure = decodeFigure(item.packed));
  const article = document.getElementById(figure.name);
  const [plot, legend, numbers, seeds] = ["plot", "legend", "numbers", "seeds"].map((name) => article.querySelector(`.${name}`));
  const points = visible(figure.points, state);
  item.stale = false;
  item.width = plot.clientWidth;
  plot.style.minHeight = "0";
  const theirs = points.some((point) => point.source !== OURS);
  const mark = !theirs ? "" : figure.kind === "bars" ? " Diamonds: the paper." : " Dashed, with hollow markers: the paper.";
  seeds.textContent = figure.kind === "embedding" ? "" : describeSeeds(points) + mark;
  fillNumbers(numbers, figure, points);
  if (!points.length) {
    legend.replaceChildren();
    plot.replaceChildren(element("p", { className: "empty" }, "Nothing to show with these filters."));
    return;
  }
  if (figure.kind === "embedding") { drawPanels(plot, figure, points); return; }
  if (figure.kind === "matrix") { drawChosenMatrix(plot, item, figure, points); return; }
  drawLegend(legend, item, figure, points);
  const entries = summarize(points.filter((point) => !item.hidden.has(point.series)));
  if (!entries.length) {
    plot.replaceChildren(element("p", { className: "empty" }, "Every series is switched off below."));
    return;
  }
  const drawer = figure.kind === "bars" ? drawBars : drawLine;
  plot.replaceChildren(labelPicture(drawer(figure, entries, item.places, item.width), summaryText(figure, entries)));
}

function drawPanels(plot, figure, points) {
  const panels = drawEmbedding(figure, points, plot.clientWidth).map(({ series, svg }) => {
    labelPicture(svg, `${figure.title}: ${series}. Scatter plot. The points stand in the table below.`);
    return element("figure", {}, element("figcaption", {}, series), svg);
  });
  plot.replaceChildren(element("div", { className: "panels" }, ...panels));
}

function drawChosenMatrix(plot, item, figure, points) {
  const whose = [...new Set(points.map((point) => point.label))];
  const chosen = whose.includes(item.pick) ? item.pick : whose[0];
  const children = [];
  if (whose.length > 1) {
    const select = element("select", {}, ...whose.map((name) => element("option", { value: name, selected: name === chosen }, name)));
    select.addEventListener("change", () => { item.pick = select.value; draw(item); plot.querySelector("select").focus(); });
    children.push(element("label", { className: "pick" }, "Run: ", select));
  }
  const own = points.filter((point) => point.label === chosen);
  // One entry a cell, over the seeds: x and series place it, the label is the same.
  const entries = summarize(own.map((point) => ({ ...point, label: "" })));
  const text = `${figure.title}: ${chosen}. Heat map of ${entries.length} cells. The numbers stand in the table below.`;
  children.push(labelPicture(drawMatrix(figure, entries, item.places, plot.clientWidth), text));
  plot.replaceChildren(...children);
}

function swatch(place, paperOnly) {
  const { colour, symbol, dash } = styleOf(place);
  const picture = d3.create("svg").attr("width", 26).attr("height", 12).attr("aria-hidden", "true");
  picture.append("line").attr("x1", 0).attr("x2", 26).attr("y1", 6).attr("y2", 6).attr("stroke", colour).attr("stroke-width", 2)
    .attr("stroke-dasharray", paperOnly ? PAPER_DASH : dash);
  const shape = d3[`symbol${symbol[0].toUpperCase()}${symbol.slice(1)}`];
  picture.append("path").attr("d", d3.symbol(shape, 42)()).attr("transform", "translate(13,6)")
    .attr("fill", paperOnly ? "var(--paper)" : colour).attr("stroke", colour);
  return picture.node();
}

function drawLegend(legend, item, figure, points) {
  const names = figure.kind === "bars" ? [] : seriesNames(points);
  const focused = legend.contains(document.activeElement) ? document.activeElement.dataset.series : null;
  const plot = legend.parentElement.querySelector(".plot");
  const highlight = (place) => {
    for (const part of plot.querySelectorAll("[data-series]")) part.classList.toggle("dim", place !== null && part.dataset.series !== String(place));
  };
  const buttons = names.map((name) => {
    const place = item.places.get(name);
    const own = points.filter((point) => point.series === name);
    const paperOnly = own.every((point) => point.source !== OURS);
    const both = !paperOnly && own.some((point) => point.source !== OURS);
    const text = `${name}${paperOnly ? " (paper)" : both ? ", paper dashed" : ""}`;
    const button = element("button", { type: "button" }, swatch(place, paperOnly), element("span", {}, text));
    button.dataset.series = place;
    button.setAttribute("aria-pressed", String(!item.hidden.has(name)));
    button.addEventListener("click", () => {
      if (!item.hidden.delete(name)) item.hidden.add(name);
      draw(item);
    });
    for (const type of ["mouseenter", "focus"]) button.addEventListener(type, () => highlight(place));
    for (const type of ["mouseleave", "blur"]) button.addEventListener(type, () => highlight(null));
    return button;
  });
  legend.replaceChildren(...buttons);
  if (focused !== null) legend.querySelector(`[data-series="${focused}"]`)?.focus();
}

// ------------------------------------------------------------------ filters, theme, links

function changed() {
  writeState(state);
  tellShown();
  for (const item of figures.values()) {
    item.stale = true;
    if (item.near) draw(item);
  }
}

// Once each: points of one run may differ in their note.
function distinctRuns() {
  const found = new Map();
  for (const values of REPORT.runs) {
    const run = Object.fromEntries(RUN_FIELDS.map((field, place) => [field, values[place]]));
    delete run.note;
    if (run.date || run.command || run.method) found.set(JSON.stringify(run), run);
  }
  return [...found.values()];
}

const RUNS = distinctRuns();

function tellShown() {
  const kept = RUNS.filter((run) => passes(run, state)).length;
  document.getElementById("shown").textContent = kept === RUNS.length ? `${kept} runs` : `${kept} of ${RUNS.length} runs`;
}

const values = Object.fromEntries(FILTERS.map(([key]) => [key, [...new Set(RUNS.map((run) => textOf(run[key])))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }))]));
makeFilters(document.getElementById("filters"), values, state, changed);
tellShown();

const themeButton = document.getElementById("theme");
const stored = (write) => { try { return write === undefined ? localStorage.getItem("krnet-theme") : localStorage.setItem("krnet-theme", write); } catch { return null; } };
function setTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  const dark = (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  themeButton.setAttribute("aria-pressed", String(dark));
  return dark;
}
setTheme(stored());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
themeButton.addEventListener("click", () => {
  const next = themeButton.getAttribute("aria-pressed") === "true" ? "light" : "dark";
  setTheme(next);
  stored(next);
});

// Figures above the target may still be drawn and move it: look again, unless the reader has scrolled on.
function goTo(name) {
  const target = document.getElementById(name);
  if (!target) return;
  target.scrollIntoView();
  target.focus({ preventScroll: true });
  let left = false;
  for (const type of ["wheel", "touchmove", "keydown", "pointerdown"]) addEventListener(type, () => { left = true; }, { once: true, passive: true });
  for (const delay of [100, 300, 700]) setTimeout(() => { if (!left) target.scrollIntoView(); }, delay);
}
for (const link of document.querySelectorAll("nav a, a.skip")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    state.at = link.getAttribute("href").slice(1);
    writeState(state);
    goTo(state.at);
  });
}
if (matchMedia("(max-width: 62rem)").matches) document.querySelector("nav details").open = false;

const near = new IntersectionObserver((changes) => {
  for (const { target, isIntersecting } of changes) {
    const item = figures.get(target.id);
    item.near = isIntersecting;
    if (isIntersecting && item.stale) draw(item);
  }
}, { rootMargin: "600px" });
let waiting = 0;
const resized = new ResizeObserver(() => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    for (const item of figures.values()) {
      if (!item.width || item.width === document.getElementById(item.packed.name).querySelector(".plot").clientWidth) continue;
      item.stale = true;
      if (item.near) draw(item);
    }
  }, 150);
});
resized.observe(document.getElementById("main"));
for (const [name, { packed }] of figures) {
  const plot = document.getElementById(name).querySelector(".plot");
  const rows = packed.kind === "bars" ? 26 * packed.series.length + 66 : 0; // about what it will take
  plot.style.minHeight = `${rows || Math.min(Math.max(plot.clientWidth * 0.52, 280), 440) + 8 * packed.series.length}px`;
  near.observe(document.getElementById(name));
}
addEventListener("beforeprint", () => { for (const item of figures.values()) if (item.stale) draw(item); });
if (state.at) goTo(state.at);
document.documentElement.dataset.ready = "yes";
