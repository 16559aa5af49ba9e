// The numbers of a figure: a table of means, a table of runs, and the latter as CSV.
"use strict";
const MOST_ROWS = 1000;

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && !key.startsWith("aria")) made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function axisName(axis, otherwise) {
  const name = axis.label || otherwise;
  return axis.unit ? `${name} (${axis.unit})` : name;
}

// Column names and rows of text, one a run and place: what the CSV holds.
function runRows(figure, points) {
  const hasX = points.some((point) => point.x !== point.series);
  const hasLabel = points.some((point) => point.label);
  const head = ["series", ...(hasX ? [axisName(figure.x, "x")] : []), axisName(figure.y, "y"), ...(hasLabel ? ["label"] : []), "source", ...RUN_FIELDS];
  const rows = points.map((point) => [
    point.series, ...(hasX ? [point.x] : []), point.y, ...(hasLabel ? [point.label] : []),
    point.source === OURS ? "ours" : "paper", ...RUN_FIELDS.map((field) => point[field] ?? ""),
  ]);
  return { head, rows };
}

// Ours beside the paper's. Nothing to add for an embedding, or where every series has one run and no paper.
function meanRows(figure, points) {
  const entries = summarize(points);
  const hasX = points.some((point) => point.x !== point.series);
  const hasLabel = points.some((point) => point.label);
  const paper = new Map(entries.filter((entry) => entry.source !== OURS).map((entry) => [JSON.stringify([entry.series, entry.x]), entry.y]));
  const ours = entries.filter((entry) => entry.source === OURS);
  const unit = figure.y.unit;
  const head = ["series", ...(hasX ? [axisName(figure.x, "x")] : []), ...(hasLabel ? ["label"] : []), `mean${unit ? ` (${unit})` : ""}`, "± deviation", "runs", ...(paper.size ? ["the paper", "ours − paper"] : [])];
  const rows = ours.map((entry) => {
    const theirs = paper.get(JSON.stringify([entry.series, entry.x]));
    const compared = theirs === undefined ? ["", ""] : [format(theirs, unit), format(entry.y - theirs, unit)];
    return [
      entry.series, ...(hasX ? [typeof entry.x === "number" ? format(entry.x, "") : entry.x] : []), ...(hasLabel ? [entry.label] : []), format(entry.y, unit),
      entry.sd === null ? "one run" : format(entry.sd, unit), entry.n, ...(paper.size ? compared : []),
    ];
  });
  return { head, rows };
}

function table(caption, { head, rows }) {
  const long = head.indexOf("command");
  const shown = rows.slice(0, MOST_ROWS);
  const cut = rows.length > shown.length ? ` The first ${MOST_ROWS} of ${rows.length} rows; the CSV holds all.` : "";
  const made = element("table", {}, element("caption", {}, caption + cut));
  made.append(element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))));
  const body = element("tbody");
  for (const row of shown) {
    const cells = row.map((value, place) => {
      if (place === 0) return element("th", { scope: "row" }, String(value));
      const isNumber = typeof value === "number" || /^-?[\d.,]+$/.test(value);
      return element("td", { className: place === long ? "long" : isNumber ? "number" : "" }, String(value));
    });
    body.append(element("tr", {}, ...cells));
  }
  made.append(body);
  return element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption }, made);
}

// RFC 4180. Text that a spreadsheet would take for a formula gets an apostrophe before it.
function csvCell(value) {
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csv({ head, rows }) {
  return [head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// The tables are made when they are opened: a page of all runs holds tens of thousands of cells.
function fillNumbers(place, figure, points) {
  const wasOpen = place.querySelector("details")?.open ?? false;
  const summary = element("summary", {}, `Numbers (${points.length.toLocaleString("en")})`);
  const details = element("details", {}, summary);
  const fill = () => {
    if (details.childElementCount > 1) return;
    const runs = runRows(figure, points);
    const button = element("button", { type: "button" }, "Download CSV");
    button.setAttribute("aria-label", `Download CSV: ${figure.title}`);
    button.addEventListener("click", () => download(`${figure.name}.csv`, csv(runs)));
    details.append(button);
    if (figure.kind !== "embedding") details.append(table(`${figure.title}: means`, meanRows(figure, points)));
    details.append(table(`${figure.title}: every run`, runs));
  };
  summary.addEventListener("click", fill); // before it opens: the next Tab goes to the button
  details.addEventListener("toggle", fill); // a browser also opens it to search in it
  if (wasOpen) { details.open = true; fill(); }
  place.replaceChildren(details);
}
