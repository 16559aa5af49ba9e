// Which runs are shown: data set, method, seed. The choice stands in the address, so that a link keeps it.
"use strict";
const FILTERS = [["data", "Data"], ["method", "Method"], ["seed", "Seed"]];
const NOT_STATED = "not stated";
const textOf = (value) => (value === null || value === "" ? NOT_STATED : String(value));

function readState() {
  const hash = location.hash.slice(1);
  const given = new URLSearchParams(hash.includes("=") ? hash : "");
  const state = { at: hash && !hash.includes("=") ? decodeURIComponent(hash) : given.get("at") ?? "" };
  for (const [key] of FILTERS) state[key] = given.has(key) ? new Set(given.getAll(key)) : null; // null: all
  return state;
}

function writeState(state) {
  const params = new URLSearchParams();
  for (const [key] of FILTERS) for (const value of state[key] ?? []) params.append(key, value);
  // An empty choice is a choice, too.
  for (const [key] of FILTERS) if (state[key]?.size === 0) params.append(key, "");
  if (state.at) params.set("at", state.at);
  const text = params.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}

function passes(point, state) {
  return FILTERS.every(([key]) => state[key] === null || state[key].has(textOf(point[key])));
}

// A series of the paper is shown with ours of the same name; and by itself, where we have none.
function visible(points, state) {
  const ours = points.filter((point) => point.source === OURS);
  const known = new Set(ours.map((point) => point.series));
  const kept = ours.filter((point) => passes(point, state));
  const shown = new Set(kept.map((point) => point.series));
  return [...kept, ...points.filter((point) => point.source !== OURS && (shown.has(point.series) || !known.has(point.series)))];
}

function makeFilters(place, values, state, changed) {
  for (const [key, title] of FILTERS) {
    const all = values[key];
    if (all.length < 2) continue;
    const summary = element("summary");
    const name = () => { summary.textContent = `${title}: ${state[key] === null ? "all" : `${state[key].size} of ${all.length}`}`; };
    const boxes = all.map((value) => {
      const box = element("input", { type: "checkbox", value, checked: state[key] === null || state[key].has(value), name: key });
      box.addEventListener("change", () => choose(boxes.filter((one) => one.checked).map((one) => one.value)));
      return box;
    });
    const choose = (chosen) => {
      state[key] = chosen.length === all.length ? null : new Set(chosen);
      name();
      changed();
    };
    const set = (checked) => () => { boxes.forEach((box) => { box.checked = checked; }); choose(checked ? all : []); };
    const [every, none] = [element("button", { type: "button" }, "All"), element("button", { type: "button" }, "None")];
    every.addEventListener("click", set(true));
    none.addEventListener("click", set(false));
    const labels = boxes.map((box) => element("label", {}, box, element("span", {}, box.value)));
    const fields = element("fieldset", {}, element("legend", {}, title), element("div", {}, every, " ", none), ...labels);
    const details = element("details", { className: "filter" }, summary, fields);
    details.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && details.open) { details.open = false; summary.focus(); }
    });
    document.addEventListener("click", (event) => { if (!details.contains(event.target)) details.open = false; });
    name();
    place.append(details);
  }
}
