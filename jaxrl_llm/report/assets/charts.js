"use strict";

// Elements, number formats, ticks, and the two kinds of chart. Text goes in as text nodes only: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const inSvg = ["svg", "g", "path", "line", "circle", "rect", "text", "title"].includes(tag);
  const node = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Text with every control or invisible formatting character as its escape.
function visible(text) {
  return String(text ?? "").replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Three or four digits of anything: 0.412, 3.0e-4, 12.4k.
function format(value, unit) {
  if (!isNumber(value)) return "–";
  if (unit === "%") return `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 2 : 1)}%`;
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(4));
}

// `largest` is the largest tick of the axis: all ticks of one axis are written in the same way.
function formatTick(value, unit, largest = value) {
  if (unit === "%") return `${+(100 * value).toPrecision(4)}%`;
  const size = Math.abs(value);
  if (value !== 0 && largest < 4e-3) return value.toExponential().replace(/(\.\d{2})\d+/, "$1");
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  return String(+value.toPrecision(6));
}

function formatSeconds(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 60) return `${+seconds.toPrecision(3)} s`;
  const [hours, minutes, rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rest} s`;
}

// Ticks at 1, 2 or 5 times a power of ten.
function niceTicks(low, high, count, whole = false) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  if (whole && step !== Math.round(step)) step = Math.max(1, 2 * power);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  const stride = Math.max(1, Math.ceil(decades / 5));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (power % stride) continue;
    for (const factor of factors) {
      const tick = +(factor * 10 ** power).toPrecision(3);
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// The range of an axis: all values, a little air, and never of width zero.
function yRange(values, spec) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!isNumber(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (spec.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const air = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const floor = low >= 0 && (spec.zero || low - air < 0) ? Math.max(low - air, 0) : low - air;
  return [floor, spec.unit === "%" && high <= 1 ? Math.min(high + air, 1.0001) : high + air];
}

const charts = [];  // All charts of the page, to draw again when the width or the smoothing changes.
let smoothing = 0;

// The data in the page, as it was when the page was made.
const pageData = () => JSON.parse(document.getElementById("data").textContent);

const shownParts = new Map();

// Draws a section unless it shows these values already. A page that follows a run is drawn many times; what the reader has typed,
// chosen or unfolded in a section stays, since it is put back into the new elements.
function showSection(id, values, draw) {
  const text = JSON.stringify(values), host = document.getElementById(id);
  if (shownParts.get(id) === text) return;
  const restore = readerState(host);
  shownParts.set(id, text);
  host.replaceChildren();
  draw(host);
  restore();
}

// Returns a function that gives a section's fields, and the focus, the state that they have now.
function readerState(host) {
  const fields = () => [...host.querySelectorAll("input, select")];
  const values = fields().map((field) => (field.type === "checkbox" ? field.checked : field.value));
  const focusable = () => [...host.querySelectorAll("input, select, button, summary, svg[tabindex]")];
  const focus = focusable().indexOf(document.activeElement);
  const [from, to] = focus < 0 ? [] : [document.activeElement.selectionStart, document.activeElement.selectionEnd];
  return () => {
    fields().forEach((field, i) => {
      const name = field.type === "checkbox" ? "checked" : "value";
      if (i >= values.length || field[name] === values[i]) return;
      const before = field[name];
      field[name] = values[i];
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field[name] = before;  // An option that is no more.
      for (const kind of ["input", "change"]) field.dispatchEvent(new CustomEvent(kind, { bubbles: true, detail: { restored: true } }));
    });
    const target = focus < 0 ? null : focusable()[focus];
    if (!target) return;
    target.focus({ preventScroll: true });
    if (isNumber(from) && target.setSelectionRange && target.type !== "number") target.setSelectionRange(from, to);
  };
}

// Moves the cursor of every chart of one axis group ("rl" or "warm_start") to a step; null takes it away.
function showStep(axis, step) {
  for (const chart of charts) if (chart.axis === axis) chart.show(step);
}

// A card with a title, a legend that doubles as the readout, and an empty drawing.
function chartCard(spec) {
  const drawing = make("svg", { height: spec.height || 190, role: "img", tabindex: 0 });
  const at = make("span", { class: "at" });
  const values = spec.series.map(() => make("b"));
  const items = spec.series.map((series, i) =>
    make("li", { class: `c${series.color ?? i % 8}` }, series.label ? make("i") : null, series.label, values[i]));
  if (spec.band) {
    values.push(make("b"));
    items.push(make("li", { class: "c0" }, make("i", { class: "shade" }), "interval", values[values.length - 1]));
  }
  const legend = make("ul", { class: "legend" }, ...items);
  const title = make("h3", {}, spec.title, spec.unit && spec.unit !== "%" ? make("span", { class: "unit" }, spec.unit) : null);
  const card = make("figure", { class: "card" }, make("figcaption", {}, title, at), legend, drawing);
  return { card, drawing, at, values };
}

function drawChart(spec) {
  const { card, drawing, at, values } = chartCard(spec);
  const steps = spec.steps;
  const chart = { axis: spec.axis, steps, card };
  const stepName = spec.axis === "warm_start" ? "warm-start step" : "step";
  let place = null;  // Geometry of the last drawing.

  chart.draw = () => {
    const width = Math.max(drawing.clientWidth || card.clientWidth - 30, 200);
    place = { width, height: spec.height || 190, left: 50, right: 10, top: 8, bottom: 26 };
    drawing.setAttribute("viewBox", `0 0 ${width} ${place.height}`);
    place.xOf = scale(chart.xLow, chart.xHigh, place.left, width - place.right);
    drawing.replaceChildren();
    (spec.kind === "stack" ? drawStack : drawLines)(spec, drawing, place);
    drawXAxis(drawing, place, chart);
    place.cursor = make("g");
    drawing.append(place.cursor);
    chart.show(null);
  };

  chart.show = (step) => {
    const i = step === null ? steps.length - 1 : nearest(steps, step);
    at.textContent = `${stepName} ${steps[i].toLocaleString("en")}`;
    spec.series.forEach((series, k) => { values[k].textContent = format(lastKnown(series.values, i, step === null), spec.unit); });
    if (spec.band) {
      const [low, high] = spec.band.map((bound) => format(lastKnown(bound, i, step === null), spec.unit));
      values[values.length - 1].textContent = `${low.replace("%", "")}–${high}`;
    }
    if (!place) return;
    place.cursor.replaceChildren();
    if (step === null) return;
    const x = place.xOf(steps[i]);
    place.cursor.append(make("line", { class: "cursor", x1: x, x2: x, y1: place.top, y2: place.height - place.bottom }));
    if (spec.kind === "stack") return;
    spec.series.forEach((series, k) => {
      if (isNumber(series.values[i])) {
        place.cursor.append(make("circle", { class: `dot c${series.color ?? k % 8}`, cx: x, cy: place.yOf(series.values[i]), r: 4 }));
      }
    });
  };

  const move = (event) => {
    const x = event.clientX - drawing.getBoundingClientRect().left;
    const share = (x - place.left) / (place.width - place.left - place.right);
    showStep(spec.axis, chart.xLow + share * (chart.xHigh - chart.xLow));
  };
  drawing.addEventListener("pointermove", move);
  drawing.addEventListener("pointerdown", move);
  drawing.addEventListener("pointerleave", () => showStep(spec.axis, null));
  drawing.addEventListener("blur", () => showStep(spec.axis, null));
  let focus = steps.length - 1;
  drawing.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    focus = Math.min(Math.max(focus + (event.key === "ArrowLeft" ? -1 : 1), 0), steps.length - 1);
    showStep(spec.axis, steps[focus]);
  });
  const last = (series) => format(lastKnown(series.values, steps.length - 1, true), spec.unit);
  const said = spec.series.map((series) => `${series.label || "value"} ${last(series)}`);
  drawing.setAttribute("aria-label", `${spec.title}, last: ${said.join(", ")}. Arrow keys move along the steps.`);
  charts.push(chart);
  return card;
}

function drawAll() {
  for (const chart of charts) chart.draw();
}

const observed = new Set();

// Draws all charts again when the width of their section changes.
function redrawWhenResized(host) {
  if (observed.has(host)) return;
  observed.add(host);
  let width = host.clientWidth;
  new ResizeObserver(() => { if (host.clientWidth !== width) { width = host.clientWidth; drawAll(); } }).observe(host);
}

const scale = (low, high, from, to) => (value) => from + (high > low ? (value - low) / (high - low) : 0.5) * (to - from);

// The value at row i; at rest, the last one that is known.
function lastKnown(values, i, search) {
  while (search && i > 0 && !isNumber(values[i])) i--;
  return values[i];
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function drawXAxis(drawing, place, chart) {
  const base = place.height - place.bottom;
  drawing.append(make("line", { class: "axis", x1: place.left, x2: place.width - place.right, y1: base, y2: base }));
  const ticks = chart.xHigh > chart.xLow ? niceTicks(chart.xLow, chart.xHigh, place.width / 90, true) : [chart.xLow];
  for (const tick of ticks) {
    const x = place.xOf(tick);
    const anchor = x > place.width - place.right - 14 ? "end" : "middle";
    drawing.append(make("text", { x, y: base + 18, "text-anchor": anchor }, formatTick(tick)));
  }
  drawing.append(make("text", { x: 0, y: base + 18 }, chart.xName ?? "step"));
}

function drawYAxis(drawing, place, ticks, spec) {
  const largest = Math.max(...ticks.map(Math.abs));
  for (const tick of ticks) {
    const y = place.yOf(tick);
    drawing.append(make("line", { class: "gridline", x1: place.left, x2: place.width - place.right, y1: y, y2: y }));
    drawing.append(make("text", { x: place.left - 8, y: y + 4, "text-anchor": "end" }, formatTick(tick, spec.unit, largest)));
  }
}

// Puts `yOf` into the place of a drawing, and draws the axis: logarithmic where the chart asks for it and the values allow it.
function placeValues(values, spec, drawing, place) {
  const positive = values.filter((value) => isNumber(value) && value > 0);
  const [least, most] = positive.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const log = positive.length > 0 && (spec.log === true || (spec.log === "auto" && most / least > 8));
  const [bottom, top] = [place.height - place.bottom, place.top];
  if (log) {
    // Zeros have no place on a log axis: they lie on its floor, and the readout tells them apart.
    const [low, high] = most > least ? [least / 1.3, most * 1.3] : [least / 3, most * 3];
    const toLog = scale(Math.log(low), Math.log(high), bottom, top);
    place.yOf = (value) => toLog(Math.log(Math.max(value, low)));
    drawYAxis(drawing, place, logTicks(low, high), spec);
  } else {
    const [low, high] = yRange(values, spec);
    place.yOf = scale(low, high, bottom, top);
    drawYAxis(drawing, place, niceTicks(low, high, 5.5, spec.whole), spec);
  }
}

function drawLines(spec, drawing, place) {
  placeValues([...spec.series.map((series) => series.values), ...(spec.band || [])].flat(), spec, drawing, place);
  if (spec.band) drawing.append(make("path", { class: "band c0", d: bandPath(spec.steps, spec.band, place) }));
  // Backwards, so that the first series, the one that matters most, lies on top.
  [...spec.series.entries()].reverse().forEach(([i, series]) => {
    const color = `c${series.color ?? i % 8}`;
    const smooth = smoothing && spec.steps.length >= 8 && spec.phase !== "eval";
    drawing.append(make("path", { class: `line ${smooth ? "raw" : ""} ${color}`, d: linePath(spec.steps, series.values, place) }));
    if (smooth) drawing.append(make("path", { class: `line ${color}`, d: linePath(spec.steps, smoothed(series.values), place) }));
    else if (spec.steps.length <= 30) drawDots(drawing, spec.steps, series.values, place, color);
  });
}

function drawDots(drawing, steps, values, place, color) {
  values.forEach((value, i) => {
    if (isNumber(value)) drawing.append(make("circle", { class: `dot ${color}`, cx: place.xOf(steps[i]), cy: place.yOf(value), r: 3.3 }));
  });
}

// Exponential mean, unbiased at its start.
function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    mean = smoothing * mean + (1 - smoothing) * value;
    weight = smoothing * weight + 1 - smoothing;
    return mean / weight;
  });
}

// A broken line: gaps where a value is missing. Where points crowd, each pixel keeps its lowest and highest, so that no spike is lost.
function linePath(steps, values, place) {
  const crowded = steps.length > 2 * place.width;
  let path = "", open = false, column = null, low = 0, high = 0;
  const put = (x, value) => {
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${place.yOf(value).toFixed(1)}`;
    open = true;
  };
  const flush = () => {
    if (column !== null) { put(column, low); if (high !== low) put(column, high); }
    column = null;
  };
  values.forEach((value, i) => {
    if (!isNumber(value)) { flush(); open = false; return; }
    const x = place.xOf(steps[i]);
    if (!crowded) { put(x, value); return; }
    if (Math.round(x) !== column) { flush(); column = Math.round(x); low = high = value; }
    low = Math.min(low, value);
    high = Math.max(high, value);
  });
  flush();
  return path;
}

function bandPath(steps, [lows, highs], place) {
  const known = steps.map((_, i) => i).filter((i) => isNumber(lows[i]) && isNumber(highs[i]));
  if (!known.length) return "";
  const point = (i, values) => `${place.xOf(steps[i]).toFixed(1)} ${place.yOf(values[i]).toFixed(1)}`;
  return `M${known.map((i) => point(i, highs)).join("L")}L${known.reverse().map((i) => point(i, lows)).join("L")}Z`;
}

// Stacked bars, one per step; where they crowd, each bar is the mean of the steps under it.
function drawStack(spec, drawing, place) {
  const count = spec.steps.length;
  const inner = place.width - place.left - place.right;
  const per = Math.max(1, Math.ceil(count / (inner / 3)));
  const bars = [];
  for (let from = 0; from < count; from += per) {
    const to = Math.min(from + per, count);
    bars.push({ step: (spec.steps[from] + spec.steps[to - 1]) / 2, heights: spec.series.map(({ values }) =>
      values.slice(from, to).reduce((sum, value) => sum + (isNumber(value) ? value : 0), 0) / (to - from)) });
  }
  const totals = bars.map(({ heights }) => heights.reduce((a, b) => a + b, 0));
  // The first step compiles and can take ten times as long as any other: bars that would flatten the rest run out of the top, and say so.
  const usual = 2 * [...totals].sort((a, b) => a - b)[Math.floor(0.9 * (totals.length - 1))];
  const total = Math.min(Math.max(...totals), usual * 1.5 > Math.max(...totals) ? Infinity : usual || Infinity);
  place.yOf = scale(0, total * 1.05 || 1, place.height - place.bottom, place.top);
  drawYAxis(drawing, place, niceTicks(0, total * 1.05 || 1, 5.5), spec);
  const width = Math.max(1, Math.min(24, (inner / bars.length) * 0.8));
  const paths = spec.series.map(() => "");
  bars.forEach(({ step, heights }, i) => {
    let below = 0;
    const x = Math.min(Math.max(place.xOf(step) - width / 2, place.left), place.width - place.right - width);
    heights.forEach((height, k) => {
      const [from, to] = [below, below + height].map((y) => place.yOf(Math.min(y, total * 1.05)).toFixed(1));
      if (from !== to) paths[k] += `M${x.toFixed(1)} ${from}h${width.toFixed(1)}V${to}h-${width.toFixed(1)}Z`;
      below += height;
    });
    if (totals[i] > total * 1.05) {
      const atRight = x > place.width * 0.7;
      drawing.append(make("text", { x: atRight ? x - 4 : x + width + 4, y: place.top + 9, "text-anchor": atRight ? "end" : "start" },
        `↑ ${format(totals[i])}`));
    }
  });
  paths.forEach((d, k) => drawing.append(make("path", { class: `stack c${k % 8}`, d })));
}
