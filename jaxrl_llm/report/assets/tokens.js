"use strict";

// The token heat-map of a rollout, and what its numbers come to.

// What tokens can be coloured by. `reach` is what the strongest colour stands for; `share` goes from -1 (low) over 0 (blank) to 1.
const HEATS = {
  // The strongest colour is the largest part of any token on the page, so that responses can be compared.
  "blame/loss": {
    name: "part of the loss", legend: "ratio", reach: (values, row) => row["blame/largest"] || 1, ends: (reach) => [`−${format(reach)}`, `+${format(reach)}`],
    share: (value, reach) => value / reach, say: (value) => `part of the loss ${+value.toPrecision(4)}`,
  },
  "blame/share": {
    name: "share of the response's |loss|", legend: "surprise", reach: (values) => largest(values), ends: (reach) => ["0", format(reach, "%")],
    share: (value, reach) => value / reach, say: (value) => `${format(value, "%")} of the response's |loss|`,
  },
  logprobs: {
    name: "log-probability", legend: "surprise", reach: () => 5, ends: () => ["likely (0)", "surprising (−5 or less)"],
    share: (value, reach) => -value / reach, say: (value) => `log-probability ${format(value)} (p = ${format(Math.exp(value))})`,
  },
  log_ratio: {
    name: "log-ratio", legend: "ratio", reach: (values) => largest(values), ends: (reach) => [`−${format(reach)}`, `+${format(reach)}`],
    share: (value, reach) => value / reach, say: (value) => `log-ratio ${+value.toPrecision(4)} (ratio ${+Math.exp(value).toPrecision(6)})`,
  },
  gate_weight: {
    name: "gate weight", legend: "ratio", ends: (reach) => [format(1 - reach), format(1 + reach)],
    // Tokens without gradient are marked by themselves: they would take all colour from the others.
    reach: (values) => largest(values.filter((value) => value !== 0).map((value) => isNumber(value) ? value - 1 : null)),
    share: (value, reach) => (value === 0 ? 0 : (value - 1) / reach), say: (value) => `gate weight ${+value.toPrecision(6)}`,
  },
  entropy: {
    name: "entropy", legend: "surprise", reach: (values) => largest(values), ends: (reach) => ["sure (0)", `${format(reach)} nats`],
    share: (value, reach) => value / reach, say: (value) => `entropy ${format(value)}`,
  },
};

let heatKind = null;  // What was chosen last: the next rollout opens in it.

function largest(values) {
  return values.reduce((most, value) => (isNumber(value) ? Math.max(most, Math.abs(value)) : most), 1e-4);
}

// Of a rollout whose tokens have numbers: the largest |log-ratio|, tokens whose gradient is gated away, and the mean entropy.
function tokenStatistics(row) {
  const numbers = (name) => (Array.isArray(row[name]) ? row[name].filter(isNumber) : []);
  const [ratios, gates, entropies] = ["log_ratio", "gate_weight", "entropy"].map(numbers);
  return {
    reach: ratios.length ? ratios.reduce((most, value) => Math.max(most, Math.abs(value)), 0) : null,
    silent: gates.length ? gates.filter((value) => value === 0).length : null,
    meanEntropy: entropies.length ? entropies.reduce((sum, value) => sum + value, 0) / entropies.length : null,
  };
}

// The colour of a share: one hue above 0, and for scales with two ends another below.
function heatColor(share, legend) {
  if (!isNumber(share) || share === 0) return "transparent";
  const strength = (0.85 * Math.min(Math.abs(share), 1)).toFixed(3);
  if (legend === "surprise") return share > 0 ? `rgba(var(--heat), ${strength})` : "transparent";
  return `rgba(var(--${share < 0 ? "low" : "high"}), ${strength})`;
}

function heatMap(row) {
  const kinds = Object.keys(HEATS).filter((name) => Array.isArray(row[name]) && row[name].some(isNumber));
  if (!kinds.length) return null;
  const options = kinds.map((value) => make("option", { value, selected: value === heatKind }, HEATS[value].name));
  const choice = make("select", { "aria-label": "colour of tokens", onchange: () => { heatKind = choice.value; draw(); } }, ...options);
  const legend = make("span", { class: "scale" }), box = make("div", { class: "heat mono" }), readout = make("p", { class: "readout" });
  const isSilent = (i) => Array.isArray(row.gate_weight) && row.gate_weight[i] === 0;

  function draw() {
    const values = row[choice.value], heat = HEATS[choice.value], reach = heat.reach(values, row);
    const [low, high] = heat.ends(reach);
    legend.replaceChildren(low, make("i", { class: heat.legend }), high);
    if (row.silent) legend.append(make("u", {}, "no gradient"));
    if (Array.isArray(row.written) && row.written.includes(0)) legend.append(make("em", {}, "a reply, read and not written"));
    const updated = kinds.some((name) => name !== "logprobs" && !name.startsWith("blame/"));
    const after = updated ? " The log-probability is the sampler's; all other numbers are those of the policy after the step's updates." : "";
    readout.textContent = `Point at a token for its numbers.${after}`;
    box.replaceChildren(...values.map((value, i) => {
      const [label, breaks] = tokenText(row, i);
      const classes = [row.tokens ? "" : "ids", isSilent(i) ? "clipped" : "", isTold(row, i) ? "told" : ""].filter(Boolean).join(" ");
      const span = make("span", { class: classes }, label);
      span.style.background = isTold(row, i) || !isNumber(value) ? "transparent" : heatColor(heat.share(value, reach), heat.legend);
      span.dataset.i = i;
      if (breaks) span.append(document.createElement("br"));
      return span;
    }));
  }

  function tell(event) {
    const i = event.target.dataset && event.target.dataset.i;
    if (i === undefined) return;
    for (const span of box.querySelectorAll(".here")) span.classList.remove("here");
    event.target.classList.add("here");
    readout.textContent = tokenNumbers(row, +i, row[choice.value].length);
  }
  box.addEventListener("pointerover", tell);
  box.addEventListener("click", tell);
  draw();
  return make("div", {}, make("div", { class: "heatbar" }, make("h4", {}, "Tokens by"), choice, legend), box, readout);
}

// All that is known of a token, in words.
function tokenNumbers(row, i, count) {
  const parts = [`token ${i + 1} of ${count}`, `“${tokenText(row, i)[0]}”`];
  if (row.tokens && row.token_ids) parts.push(`id ${row.token_ids[i]}`);
  if (isTold(row, i)) return [...parts, "a reply"].join(", ");
  for (const [kind, heat] of Object.entries(HEATS)) {
    if (Array.isArray(row[kind]) && isNumber(row[kind][i])) parts.push(heat.say(row[kind][i]));
  }
  return parts.join(", ");
}

// Whether an environment said it, and not the policy.
function isTold(row, i) {
  return Array.isArray(row.written) && !row.written[i];
}

// A token's text where the row has it, else its id; and whether a line ends there.
function tokenText(row, i) {
  if (!Array.isArray(row.tokens) || row.tokens[i] === undefined) return [String(row.token_ids ? row.token_ids[i] : i), false];
  const text = String(row.tokens[i]);
  return [visible(text).replaceAll("\n", "↵").replace(/^ | $/g, "·") || "∅", text.includes("\n")];
}
