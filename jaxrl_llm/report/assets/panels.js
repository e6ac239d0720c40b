"use strict";

// Which curves there are. A series is [label, metric name]; a name may be a pattern, which stands for every metric that it matches.
// A series without data is left out, and so is a chart without series.

const PANELS = [
  { group: "Learning", panels: [
    { title: "Held-out accuracy", phase: "eval", unit: "%", series: [["accuracy", "eval/accuracy"], ["", /^eval\/(pass@\d+)$/]],
      band: ["eval/accuracy_low", "eval/accuracy_high"] },
    { title: "Held-out accuracy by level", phase: "eval", unit: "%", series: [["", /^eval\/accuracy\/(.+)$/]] },
    { title: "Reward", series: [["mean", "critic/rewards/mean"], ["task score", "critic/score/mean"]] },
    { title: "Groups without a signal", unit: "%", zero: true, series: [["all rewards equal", "group/frac_reward_zero_std"]] },
    { title: "Response length", unit: "tokens", zero: true, series: [["mean", "response_length/mean"], ["max", "response_length/max"]] },
    { title: "Responses cut at the budget", unit: "%", zero: true, series: [["", "response_length/clip_ratio"]] },
  ] },
  { group: "Policy", panels: [
    { title: "Entropy", unit: "nats per token", zero: true, series: [["", "actor/entropy"]] },
    { title: "KL divergence", unit: "nats per token", series: [["to the old policy", "actor/ppo_kl"], ["to the reference", "actor/ref_kl"],
      ["KL loss", "actor/kl_loss"]] },
    { title: "Clip fraction", unit: "%", zero: true, series: [["clipped", "actor/pg_clipfrac"], ["lower", "actor/pg_clipfrac_lower"]] },
    { title: "SAPO gate", series: [["advantage > 0", "sapo/gate_pos"], ["advantage < 0", "sapo/gate_neg"]] },
    { title: "Importance ratio", log: "auto",
      series: [["max", "ratio/max", 1], ["99th percentile", "ratio/p99", 3], ["mean", "ratio/mean", 0], ["min", "ratio/min", 2]] },
    { title: "Gap between sampler and learner", unit: "nats, log axis", log: true,
      series: [["largest", "rollout_corr/logprob_abs_diff/max", 1], ["mean", "rollout_corr/logprob_abs_diff/mean", 0]] },
    { title: "Effective sample size", unit: "%", zero: true, series: [["ratio to the old policy, tokens", "ratio/ess"],
      ["ratio to the old policy, sequences", "ratio/sequence/ess"], ["weights of the correction", "rollout_corr/rollout_is/ess"]] },
  ] },
  { group: "Asynchrony", panels: [
    { title: "Lag of the weights that drew a token", unit: "RL steps", zero: true, series: [["max", "rollout/staleness/max", 1],
      ["mean", "rollout/staleness/mean", 0], ["min", "rollout/staleness/min", 2]] },
    { title: "Tokens by lag", unit: "tokens, by RL steps", kind: "stack", series: [["", /^rollout\/staleness\/tokens\/(\d+)$/]] },
    { title: "Responses drawn by several weights", unit: "%", zero: true, series: [["", "rollout/staleness/partial_ratio"]] },
  ] },
  { group: "Experts", panels: [
    { title: "Changed experts", unit: "%", zero: true, series: [["by an update", "moe/expert_change/update"],
      ["between sampler and learner", "moe/expert_change/sampler"], ["from the replayed routes", "moe/replay_expert_change"]] },
    { title: "Load of the busiest expert", unit: "even shares", zero: true, series: [["mean over layers", "moe/load_max"]] },
    { title: "Experts without a token", unit: "%", zero: true, series: [["", "moe/unused"]] },
    { title: "Missing routes in the replay", unit: "%", zero: true, series: [["", "moe/replay_fallback"]] },
  ] },
  { group: "Optimizer", panels: [
    { title: "Loss", series: [["total", "actor/loss"], ["policy", "actor/pg_loss"]] },
    { title: "Gradient norm", log: "auto", series: [["before clipping", "actor/grad_norm"]] },
    { title: "Learning rate", zero: true, series: [["", "actor/lr"]] },
    { title: "Skipped steps", unit: "updates refused in the step", zero: true, whole: true, series: [["", "train/skipped_steps"]] },
    { title: "Reward model's loss", phase: "reward_model", unit: "nats per pair", series: [["total", "reward_model/loss"]] },
    { title: "Reward model's accuracy", phase: "reward_model", unit: "%", series: [["on the step's pairs", "reward_model/accuracy"]] },
    { title: "Reward model's scores", phase: "reward_model", series: [["chosen", "reward_model/chosen"],
      ["rejected", "reward_model/rejected"], ["margin", "reward_model/margin"]] },
    { title: "Warm-start loss", phase: "warm_start", unit: "nats per token", series: [["", "actor/loss"]] },
    { title: "Warm-start gradient norm", phase: "warm_start", log: "auto", series: [["before clipping", "actor/grad_norm"]] },
  ] },
  { group: "Alarms", panels: [
    { title: "Active alarms", unit: "of the step", kind: "stack", series: [["", /^alarm\/(.+)$/]] },
  ] },
  { group: "Speed", panels: [
    { title: "Time per step", unit: "seconds", kind: "stack",
      series: [["rollout", "timing_s/rollout"], ["reward", "timing_s/reward"], ["old log-probs", "timing_s/old_logprobs"],
        ["update", "timing_s/update"], ["eval", "timing_s/eval"], ["checkpoint", "timing_s/checkpoint"],
        ["", /^timing_s\/(?!step$|total$|rollout$|reward$|old_logprobs$|update$|eval$|checkpoint$)(.+)$/]] },
    { title: "Idle time", unit: "%", zero: true,
      series: [["learner, waiting for rollouts", "perf/learner_idle"], ["samplers, mean", "samplers/idle_mean"]] },
    { title: "Throughput", unit: "tokens per second", zero: true, series: [["", "perf/throughput"]] },
    { title: "Packing waste", unit: "%", zero: true, series: [["padding", "perf/packing_waste"]] },
    { title: "Peak memory", unit: "GB", zero: true, series: [["", "perf/max_memory_allocated_gb"]] },
    { title: "Compilations", unit: "so far", zero: true, whole: true, series: [["", "perf/compiles"]] },
  ] },
];

// The time of an evaluation stands in its own row; the step that it followed is charged for it.
function withEvalTime(phases) {
  const seconds = phases.eval && phases.eval["timing_s/eval"];
  if (!phases.rl || !seconds || phases.rl["timing_s/eval"]) return phases;
  const at = new Map(phases.eval.step.map((step, i) => [step, seconds[i]]));
  return { ...phases, rl: { ...phases.rl, "timing_s/eval": phases.rl.step.map((step) => at.get(step) ?? 0) } };
}

// pass@8 comes before pass@16.
const byNumber = (a, b) => a.localeCompare(b, "en", { numeric: true });

function resolvePanel(panel, phases) {
  const phase = panel.phase || "rl";
  const columns = phases[phase];
  if (!columns) return null;
  const series = [];
  for (const [label, name, color] of panel.series) {
    const names = name instanceof RegExp ? Object.keys(columns).filter((key) => name.test(key)).sort(byNumber) : [name];
    for (const key of names) {
      if (!columns[key] || !columns[key].some(isNumber)) continue;
      // A stack leaves out what never took time; a curve of zeros says something.
      if (panel.kind === "stack" && !columns[key].some((value) => value > 0)) continue;
      const own = name instanceof RegExp ? key.match(name)[1].replaceAll("_", " ") : "";
      series.push({ label: label || own, values: columns[key], color });
    }
  }
  if (!series.length) return null;
  const band = panel.band && panel.band.every((key) => columns[key]) ? panel.band.map((key) => columns[key]) : null;
  return { ...panel, series, band, steps: columns.step, axis: phase === "warm_start" ? phase : "rl" };
}

let chosenSmoothing = null;  // Of the reader.

function showCurves(host, metrics) {
  const phases = withEvalTime(metrics);
  charts.length = 0;
  // Hundreds of noisy points fill their chart: a long run opens smoothed, with the raw curves faint behind.
  smoothing = chosenSmoothing ?? (phases.rl && phases.rl.step.length > 300 ? 0.9 : 0);
  const smooth = make("select", { id: "smooth", onchange: (event) => { smoothing = chosenSmoothing = +event.target.value; drawAll(); } },
    ...[["none", 0], ["some", 0.6], ["strong", 0.9]].map(([name, value]) =>
      make("option", { value, selected: value === smoothing }, name)));
  host.append(make("div", { class: "bar" }, make("h2", {}, "Curves"), make("label", {}, "Smoothing ", smooth)));
  for (const { group, panels } of PANELS) {
    const cards = panels.map((panel) => resolvePanel(panel, phases)).filter(Boolean).map(drawChart);
    if (cards.length) host.append(make("h3", { class: "group" }, group), make("div", { class: "grid" }, ...cards));
  }
  if (!charts.length) { host.append(make("p", { class: "empty" }, "No metrics yet.")); return; }
  // One x axis for all charts of a group: the eye can go down a column.
  for (const axis of ["rl", "warm_start"]) {
    const members = charts.filter((chart) => chart.axis === axis);
    const low = Math.min(...members.map(({ steps }) => steps[0]));
    const high = Math.max(...members.map(({ steps }) => steps[steps.length - 1]));
    for (const chart of members) Object.assign(chart, { xLow: low, xHigh: high });
  }
  drawAll();
  redrawWhenResized(host);
}
