"use strict";

// The page of several runs: a chart for each metric, with a line for each arm, against steps, tokens or seconds.

const view = { axis: "step", seeds: false, band: true, hidden: new Set() };

// Every chart shows the same place; null is the last point of each curve.
function showPlace(x) {
  for (const chart of charts) chart.show(x);
}

function comparisonCard(panel) {
  const drawing = make("svg", { height: 210, role: "img", tabindex: 0 });
  const at = make("span", { class: "at" }), legend = make("ul", { class: "legend arms" });
  const unit = panel.unit && panel.unit !== "%" ? make("span", { class: "unit" }, panel.unit) : null;
  const title = make("h3", { title: panel.metric }, panel.title, unit);
  return { card: make("figure", { class: "card" }, make("figcaption", {}, title, at), legend, drawing), drawing, at, legend };
}

function drawComparison(panel, arms, axes) {
  const { card, drawing, at, legend } = comparisonCard(panel);
  const chart = { card };
  let place = null, shown = [], values = [];

  chart.draw = () => {
    shown = panel.curves[view.axis].filter(({ arm }) => !view.hidden.has(arms[arm].name));
    const width = Math.max(drawing.clientWidth || card.clientWidth - 30, 200);
    place = { width, height: 210, left: 60, right: 10, top: 8, bottom: 40 };
    drawing.setAttribute("viewBox", `0 0 ${width} ${place.height}`);
    drawing.replaceChildren();
    values = shown.map(() => make("b"));
    legend.replaceChildren(...shown.map(({ arm }, i) =>
      make("li", { title: arms[arm].name }, swatch(arm), make("span", { class: "short" }, visible(arms[arm].name)), values[i])));
    at.textContent = "";
    if (!shown.length) {
      const why = panel.curves[view.axis].length ? "all arms are hidden" : `no data for ${axes[view.axis]}`;
      drawing.append(make("text", { x: width / 2, y: 100, "text-anchor": "middle" }, why));
      return;
    }
    const xs = shown.flatMap(({ x }) => [x[0], x[x.length - 1]]);
    [chart.xLow, chart.xHigh, chart.xName] = [Math.min(...xs), Math.max(...xs), ""];
    place.xOf = scale(chart.xLow, chart.xHigh, place.left, width - place.right);
    drawCurves();
    drawXAxis(drawing, place, chart);
    drawing.append(make("text", { x: place.left + (width - place.left - place.right) / 2, y: place.height - 4, "text-anchor": "middle" },
      panel.phase === "reward_model" ? "training step" : axes[view.axis]));
    place.cursor = make("g");
    drawing.append(place.cursor);
    chart.show(null);
  };

  function drawCurves() {
    const band = ({ low, high }) => (view.band ? [...low, ...high] : []);
    const lines = (curve) => [...curve.mean, ...(view.seeds ? curve.seeds.flatMap(({ y }) => y) : [])];
    // A band of two or three seeds can be so wide that it flattens all curves: it runs out of the drawing, up to half its height each way.
    const inner = shown.flatMap(lines).filter(isNumber);
    let [low, high] = inner.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    const air = (high - low) / 2 || Math.abs(high) / 4;
    const outer = shown.flatMap(band).filter(isNumber).map((value) => Math.min(Math.max(value, low - air), high + air));
    placeValues([...inner, ...(panel.zero || low >= 0 ? outer.map((value) => Math.max(value, 0)) : outer)], panel, drawing, place);
    const floor = place.height - place.bottom;
    const clamped = { ...place, yOf: (value) => Math.min(Math.max(place.yOf(value), place.top), floor) };
    for (const curve of view.band ? shown : []) {
      const bounds = panel.log ? [curve.low.map((value) => (isNumber(value) ? Math.max(value, 1e-30) : value)), curve.high] : [curve.low, curve.high];
      drawing.append(make("path", { class: `band ${armClass(curve.arm)}`, d: bandPath(curve.x, bounds, clamped) }));
    }
    for (const curve of view.seeds ? shown : []) {
      for (const seed of curve.seeds) {
        drawing.append(make("path", { class: `line raw ${armClass(curve.arm)}`, d: linePath(seed.x, smoothing ? smoothed(seed.y) : seed.y, place) },
          make("title", {}, visible(arms[curve.arm].runs[seed.run].name))));
      }
    }
    for (const curve of [...shown].reverse()) {
      const y = smoothing && curve.x.length >= 8 && panel.phase !== "eval" ? smoothed(curve.mean) : curve.mean;
      drawing.append(make("path", { class: `line ${armClass(curve.arm)}`, d: linePath(curve.x, y, place) }));
      if (curve.x.length <= 12) drawDots(drawing, curve.x, y, place, armClass(curve.arm));
    }
  }

  chart.show = (x) => {
    if (!shown.length) return;
    place.cursor.replaceChildren();
    at.textContent = x === null ? "last" : `${axes[view.axis]} ${format(x)}`;
    if (x !== null) {
      const at = place.xOf(Math.min(Math.max(x, chart.xLow), chart.xHigh));
      place.cursor.append(make("line", { class: "cursor", x1: at, x2: at, y1: place.top, y2: place.height - place.bottom }));
    }
    shown.forEach((curve, k) => {
      const last = curve.x.length - 1, i = x === null ? last : nearest(curve.x, x);
      // Beyond its end a curve says nothing.
      const beyond = x !== null && (x > curve.x[last] + (curve.x[last] - curve.x[Math.max(last - 1, 0)]) / 2 + 1e-9);
      const spread = isNumber(curve.low[i]) ? ` [${format(curve.low[i], panel.unit)}, ${format(curve.high[i], panel.unit)}]` : "";
      values[k].textContent = beyond ? "ended" : `${format(curve.mean[i], panel.unit)}${spread}`;
      values[k].title = `mean of ${curve.n[i]} of ${arms[curve.arm].runs.length} runs`;
      if (x !== null && !beyond && isNumber(curve.mean[i])) {
        place.cursor.append(make("circle", { class: `dot ${armClass(curve.arm)}`, cx: place.xOf(curve.x[i]), cy: place.yOf(curve.mean[i]), r: 4 }));
      }
    });
  };

  const move = (event) => {
    if (!shown.length) return;
    const share = (event.clientX - drawing.getBoundingClientRect().left - place.left) / (place.width - place.left - place.right);
    showPlace(chart.xLow + Math.min(Math.max(share, 0), 1) * (chart.xHigh - chart.xLow));
  };
  for (const name of ["pointermove", "pointerdown"]) drawing.addEventListener(name, move);
  for (const name of ["pointerleave", "blur"]) drawing.addEventListener(name, () => showPlace(null));
  let focus = 1;
  drawing.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight" || !shown.length) return;
    event.preventDefault();
    focus = Math.min(Math.max(focus + (event.key === "ArrowLeft" ? -0.02 : 0.02), 0), 1);
    showPlace(chart.xLow + focus * (chart.xHigh - chart.xLow));
  });
  const said = panel.curves.step.map(({ arm, mean }) => `${arms[arm].name} ${format(mean[mean.length - 1], panel.unit)}`);
  drawing.setAttribute("aria-label", `${panel.title}, last: ${said.join("; ")}. Arrow keys move along the axis.`);
  charts.push(chart);
  return card;
}

function controls(arms, axes) {
  const choice = (name, options, pick) => make("label", {}, `${name} `, make("select", { "aria-label": name, onchange: (event) => { pick(event.target.value); drawAll(); } },
    ...options.map(([text, value, selected]) => make("option", { value, selected }, text))));
  const check = (name, key) => make("label", {}, make("input", { type: "checkbox", checked: view[key], "aria-label": name,
    onchange: (event) => { view[key] = event.target.checked; drawAll(); } }), ` ${name}`);
  const toggles = arms.map((arm, i) => make("button", { type: "button", class: "arm", "aria-pressed": String(!view.hidden.has(arm.name)), onclick: (event) => {
    const button = event.currentTarget;
    if (view.hidden.delete(arm.name)) button.setAttribute("aria-pressed", "true");
    else { view.hidden.add(arm.name); button.setAttribute("aria-pressed", "false"); }
    drawAll();
  } }, swatch(i), visible(arm.name)));
  const bar = make("div", { class: "controls" },
    choice("Against", Object.entries(axes).map(([key, name]) => [name, key, key === view.axis]), (value) => { view.axis = value; }),
    choice("Smoothing", [["none", 0], ["some", 0.6], ["strong", 0.9]].map(([name, value]) => [name, value, value === smoothing]), (value) => { smoothing = +value; }),
    check("95% bands", "band"), check("every seed", "seeds"));
  return [bar, make("div", { class: "armbar" }, ...toggles)];
}

function showComparedCurves(host, { arms, panels, axes }) {
  charts.length = 0;
  host.append(make("h2", {}, "Curves"));
  if (!panels.length) { host.append(make("p", { class: "empty" }, "No metrics yet.")); return; }
  host.append(make("div", { class: "sticky" }, ...controls(arms, axes)));
  for (const group of new Set(panels.map((panel) => panel.group))) {
    const cards = panels.filter((panel) => panel.group === group).map((panel) => drawComparison(panel, arms, axes));
    host.append(make("h3", { class: "group" }, group), make("div", { class: "grid" }, ...cards));
  }
  drawAll();
  redrawWhenResized(host);
}

function showComparisonHead(host, { title, arms, notes }) {
  const runs = arms.flatMap((arm) => arm.runs);
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  document.title = `${visible(title)} – comparison – jaxrl_llm`;
  host.append(make("div", { class: "title" }, make("h1", {}, visible(title))),
    make("p", { class: "sub" }, `${count(arms.length, "arm")}, ${count(runs.length, "run")}: ${states(runs)}`));
  if (notes.length) host.append(make("ul", { class: "notes" }, ...notes.map((note) => make("li", {}, visible(note)))));
}

function showPage(data) {
  const { arms, panels, axes, fields } = data;
  showSection("head", [data.title, data.notes, arms.map((arm) => arm.runs.map((run) => run.state))], (host) => showComparisonHead(host, data));
  showSection("results", arms, (host) => showResults(host, arms));
  showSection("curves", [arms.map((arm) => [arm.name, arm.runs.map((run) => run.name)]), panels, axes], (host) => showComparedCurves(host, data));
  showSection("config", [arms.map((arm) => arm.name), fields], (host) => showDifferences(host, arms, fields));
  showSection("runs", arms, (host) => showRuns(host, arms));
  const sections = [["results", "Results"], ["curves", "Curves"], ["config", "Differences"], ["runs", "Runs"]];
  showSection("nav", "", (host) => host.append(...sections.map(([id, name]) => make("a", { href: `#${id}` }, name))));
  showSection("foot", data.source ?? "", (host) => host.append(
    `Made by jaxrl_llm from metrics.jsonl, config.json and summary.json of each run. ${data.source ?? "This page needs no network."}`));
}

showPage(pageData());
