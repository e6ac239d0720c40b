"use strict";

// Arms as tables: results, the settings that differ, and the runs behind each.

// The line of an arm, as the charts draw it: colours repeat after eight arms, dashes after five.
const armClass = (arm) => `c${arm % 8} d${arm % 5}`;

function swatch(arm) {
  const line = make("path", { class: `line ${armClass(arm)}`, d: "M1 5H27" });
  return make("svg", { class: "swatch", width: 28, height: 10, viewBox: "0 0 28 10", "aria-hidden": "true" }, line);
}

// A mean with its interval, or with the reason why it has none.
function withInterval(found, unit, signed = false) {
  if (!found) return "–";
  const sign = (value) => (signed && value > 0 ? "+" : "");
  const write = (value) => (unit === "points" ? `${sign(value)}${(100 * value).toFixed(1)}` : `${sign(value)}${format(value, unit)}`);
  const mean = make("b", {}, write(found.mean));
  if (!isNumber(found.low)) return make("span", {}, mean, make("small", {}, ` one seed, no interval`));
  return make("span", {}, mean, make("small", {}, ` [${write(found.low)}, ${write(found.high)}]`));
}

function table(head, rows) {
  return make("div", { class: "card scroll" }, make("table", { class: "wide" },
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {}, name)))), make("tbody", {}, ...rows)));
}

// A short text, such as a number, is not broken.
const cells = (values) => values.map((value) =>
  make("td", { class: typeof value === "string" && value.length <= 12 ? "whole" : null }, value ?? "–"));

function armName(arms, i) {
  return make("span", { class: "armname" }, swatch(i), visible(arms[i].name));
}

// "3 finished, 1 failed": how the runs of an arm stand.
function states(runs) {
  const counts = new Map();
  for (const run of runs) counts.set(run.state, (counts.get(run.state) || 0) + 1);
  return [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
}

function showResults(host, arms) {
  const seeds = (arm) => new Set(arm.runs.map((run) => run.seed)).size;
  const rows = arms.map((arm, i) => {
    const { result } = arm;
    const why = result.so_far || arms[0].result.so_far ? "not finished" : "no seed in common";
    const difference = i === 0 ? "the first" : result.difference ? withInterval(result.difference, "points", true) : why;
    const n = `${seeds(arm)}${result.counted < arm.runs.length ? ` (${result.counted} of ${arm.runs.length} runs counted)` : ""}`;
    return make("tr", {}, ...cells([armName(arms, i), n, withInterval(result.start, "%"), withInterval(result.final, "%"),
      withInterval(result.gain, "points", true), difference, isNumber(result.tokens) ? format(result.tokens) : null,
      isNumber(result.steps) ? format(result.steps) : null, isNumber(result.seconds) ? formatSeconds(result.seconds) : null,
      states(arm.runs) + (result.so_far ? ", so far" : "")]));
  });
  const head = ["Arm", "Seeds", "Accuracy at the start", "Accuracy at the end", "Gain, points", "Difference from the first arm, points", "Tokens",
    "RL steps", "Wall time", "Runs"];
  host.append(make("h2", {}, "Results"), make("p", { class: "lead" }, "Means over seeds, with Student's 95% interval over seeds in brackets. "
    + "The difference from the first arm is paired over the seeds that both arms have."), table(head, rows));
}

// More arms than that get a row each instead of a column.
const MOST_COLUMNS = 5;

function showDifferences(host, arms, fields) {
  host.append(make("h2", {}, "Differences"));
  if (!fields.length) {
    host.append(make("p", { class: "empty" }, arms.length > 1 ? "The configs do not differ." : "There is one arm, whose runs differ only in their seed."));
    return;
  }
  const write = (value) => (value === null ? "None" : visible(typeof value === "string" ? value : JSON.stringify(value)));
  if (arms.length > MOST_COLUMNS) {
    const settings = arms.map((_, i) => fields.map(({ field, values }) => make("div", { class: "mono" }, `${field} = ${write(values[i])}`)));
    host.append(table(["Arm", "Fields that differ between arms"], arms.map((_, i) =>
      make("tr", {}, make("td", {}, armName(arms, i)), make("td", {}, ...settings[i])))));
    return;
  }
  const rows = fields.map(({ field, values }) => make("tr", {}, make("td", { class: "mono" }, field),
    ...values.map((value) => make("td", { class: `mono ${value === null ? "unset" : ""}` }, write(value)))));
  host.append(table(["Field", ...arms.map((arm, i) => armName(arms, i))], rows));
}

function showRuns(host, arms) {
  const rows = arms.flatMap((arm, i) => arm.runs.map((run) => {
    const alarms = Object.entries(run.alarms).filter(([, count]) => isNumber(count) && count > 0)
      .map(([name, count]) => `${visible(name.replaceAll("_", " "))}${count > 1 ? ` × ${count}` : ""}`);
    const tone = { finished: "good", failed: "bad" }[run.state] || "";
    const name = run.report ? make("a", { href: run.report }, visible(run.name)) : visible(run.name);
    return make("tr", {}, ...cells([name, armName(arms, i), run.seed === null ? null : String(run.seed),
      make("span", { class: `pill ${tone}` }, visible(run.status)), format(run.start, "%"), format(run.final, "%"),
      isNumber(run.tokens) ? format(run.tokens) : null, isNumber(run.seconds) ? formatSeconds(run.seconds) : null,
      alarms.length ? make("span", { class: "alarm" }, alarms.join(", ")) : "none"]));
  }));
  host.append(make("h2", {}, "Runs"),
    table(["Run", "Arm", "Seed", "State", "Start", "End", "Tokens", "Wall time", "Alarms"], rows));
}
