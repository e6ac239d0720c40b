"use strict";

// The rollouts: filters, a histogram of rewards, and pages of rows that open.

const PAGE_SIZE = 25;

// A row says itself whether it is right; where it does not, a reward above one half does.
const isCorrect = (row) => (typeof row.correct === "boolean" ? row.correct : isNumber(row.reward) && row.reward > 0.5);

// The first that the rows have numbers for is chosen at the beginning.
const SORTS = {
  "as in the table": (a, b) => a.rank - b.rank || a.index - b.index,
  "newest first": (a, b) => b.step - a.step || a.index - b.index,
  "oldest first": (a, b) => a.step - b.step || a.index - b.index,
  "highest reward": (a, b) => (b.reward ?? 0) - (a.reward ?? 0) || b.step - a.step,
  "lowest reward": (a, b) => (a.reward ?? 0) - (b.reward ?? 0) || b.step - a.step,
  "highest advantage": (a, b) => (b.advantage ?? 0) - (a.advantage ?? 0),
  "lowest advantage": (a, b) => (a.advantage ?? 0) - (b.advantage ?? 0),
  "longest": (a, b) => (b.num_tokens ?? 0) - (a.num_tokens ?? 0),
  "shortest": (a, b) => (a.num_tokens ?? 0) - (b.num_tokens ?? 0),
  "largest log-ratio": (a, b) => (b.reach ?? -1) - (a.reach ?? -1),
  "most gated tokens": (a, b) => (b.silent ?? -1) - (a.silent ?? -1),
  "highest entropy": (a, b) => (b.meanEntropy ?? -1) - (a.meanEntropy ?? -1),
};

// What the reader has opened, which outlives the arrival of further rollouts.
const rolloutView = { page: 0, open: new Set() };
const rolloutKey = (row) => JSON.stringify([row.phase, row.step, row.prompt, row.response]);

function showRollouts(host, samples) {
  host.append(make("h2", {}, "Rollouts"));
  if (!samples.length) { host.append(make("p", { class: "empty" }, "No sample rollouts yet.")); return; }
  samples.forEach((row, index) => {
    row.index = index;
    Object.assign(row, tokenStatistics(row));
    row.haystack = `${row.prompt ?? ""}\n${row.response ?? ""}\n${row.answer ?? ""}`.toLowerCase();
  });
  const values = (name) => [...new Set(samples.map((row) => row[name]).filter((value) => value !== null && value !== undefined))];
  const numeric = (a, b) => (isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b)));
  const field = {
    phase: select("Phase", ["all", ...values("phase")]),
    step: select("Step", ["all", ...values("step").sort(numeric)]),
    level: select("Level", ["all", ...values("level").sort(numeric)]),
    group: select("Group", ["all", ...values("group").sort(numeric)]),
    correct: select("Answer", ["all", "correct", "wrong"]),
    ended: select("Ended", ["all", "by itself", "cut"]),
    sort: select("Sort", Object.keys(SORTS).filter((name) => sortable(samples, name))),
  };
  const low = make("input", { type: "number", step: "any", placeholder: "min", "aria-label": "minimum reward" });
  const high = make("input", { type: "number", step: "any", placeholder: "max", "aria-label": "maximum reward" });
  const shortest = make("input", { type: "number", min: 0, placeholder: "min", "aria-label": "minimum number of tokens" });
  const longest = make("input", { type: "number", min: 0, placeholder: "max", "aria-label": "maximum number of tokens" });
  const text = make("input", { type: "search", placeholder: "in prompt, response, answer" });
  const list = make("div", { class: "list" }), pagers = [make("div", { class: "pager" }), make("div", { class: "pager" })];
  const histogram = rewardHistogram((from, to) => { low.value = from; high.value = to; update(); });
  const form = make("form", { onsubmit: (event) => event.preventDefault() },
    values("phase").length > 1 ? field.phase.label : null, field.step.label, values("level").length ? field.level.label : null,
    values("group").length ? field.group.label : null,
    field.correct.label, values("stopped").length > 1 ? field.ended.label : null, field.sort.label,
    make("label", {}, "Reward", make("span", { class: "pair" }, low, high)),
    make("label", {}, "Tokens", make("span", { class: "pair" }, shortest, longest)),
    make("label", { class: "wide" }, "Search", text),
    make("button", { type: "button", onclick: () => { form.reset(); update(); } }, "Clear"));

  let page = rolloutView.page;
  function update(event) {
    // Further rollouts leave the reader on a page; another filter does not.
    if (!event || !(event.page || (event.detail && event.detail.restored))) page = 0;
    const is = (name, value) => field[name].input.value === "all" || field[name].input.value === String(value);
    const words = text.value.toLowerCase().trim();
    const chosen = samples.filter((row) => is("phase", row.phase) && is("step", row.step) && is("level", row.level)
      && is("group", row.group)
      && is("correct", isCorrect(row) ? "correct" : "wrong") && is("ended", row.stopped === false ? "cut" : "by itself")
      && within(row.num_tokens, shortest.value, longest.value) && row.haystack.includes(words));
    // The histogram shows what the reward filter chooses from, so that it does not shrink to the bar that was picked.
    histogram.draw(chosen);
    const kept = chosen.filter((row) => within(row.reward, low.value, high.value));
    kept.sort(SORTS[field.sort.input.value]);
    rolloutView.page = page = Math.max(0, Math.min(page, Math.ceil(kept.length / PAGE_SIZE) - 1));
    const from = page * PAGE_SIZE;
    list.replaceChildren(...kept.slice(from, from + PAGE_SIZE).map(rolloutRow));
    if (!kept.length) list.append(make("p", { class: "empty" }, "No rollout matches these filters."));
    for (const pager of pagers) fillPager(pager, kept, samples.length, page, (next) => { page = next; update({ page: true }); });
    pagers[1].hidden = kept.length <= PAGE_SIZE;
  }
  form.addEventListener("input", update);
  host.append(make("div", { class: "filters" }, form, histogram.card), pagers[0], list, pagers[1]);
  update({ page: true });
}

// Whether a value lies within two bounds as they were typed; an empty one bounds nothing.
const within = (value, low, high) => (low === "" || value >= +low) && (high === "" || value <= +high);

// Rows need not have the numbers that an order goes by.
function sortable(samples, name) {
  const needed = { "as in the table": "rank", "largest log-ratio": "reach", "most gated tokens": "silent", "highest entropy": "meanEntropy" }[name];
  return !needed || samples.some((row) => isNumber(row[needed]));
}

function select(name, options) {
  const input = make("select", {}, ...options.map((value) => make("option", { value }, String(value))));
  return { input, label: make("label", {}, name, input) };
}

function fillPager(pager, kept, total, page, go) {
  const last = Math.max(0, Math.ceil(kept.length / PAGE_SIZE) - 1);
  const right = kept.filter(isCorrect).length;
  const share = kept.length ? `, ${format(right / kept.length, "%")} correct` : "";
  pager.replaceChildren(make("span", {}, `${kept.length.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts${share}`),
    make("button", { type: "button", disabled: page === 0, onclick: () => go(page - 1) }, "Previous"), `${page + 1} / ${last + 1}`,
    make("button", { type: "button", disabled: page >= last, onclick: () => go(page + 1) }, "Next"));
}

function rewardHistogram(pick) {
  const drawing = make("svg", { height: 150, viewBox: "0 0 330 150", role: "img", "aria-label": "Histogram of rewards" });
  const caption = make("figcaption", {}, make("h3", {}, "Rewards"), make("span", { class: "at" }, "click a bar to filter by its range"));
  const card = make("figure", { class: "card" }, caption, drawing);
  function draw(rows) {
    const rewards = rows.map((row) => row.reward).filter(isNumber);
    drawing.replaceChildren();
    if (!rewards.length) return;
    let [low, high] = [Infinity, -Infinity];
    for (const reward of rewards) [low, high] = [Math.min(low, reward), Math.max(high, reward)];
    const distinct = [...new Set(rewards)].sort((a, b) => a - b);
    // Few different rewards (right or wrong) get a bar each; many are binned.
    const bins = distinct.length <= 8 ? distinct.map((value) => [value, value])
      : Array.from({ length: 16 }, (_, i) => [low + (i * (high - low)) / 16, low + ((i + 1) * (high - low)) / 16]);
    const inBin = (reward, [from, to], i) => reward >= from && (reward < to || (reward === to && (from === to || i === bins.length - 1)));
    const counts = bins.map((bin, i) => rewards.filter((reward) => inBin(reward, bin, i)).length);
    const most = Math.max(...counts), slot = 320 / bins.length, width = Math.min(slot * 0.86, 56);
    counts.forEach((count, i) => {
      const height = (100 * count) / most, x = 5 + slot * (i + 0.5), [from, to] = bins[i];
      const name = from === to ? format(from) : `${format(from)} to ${format(to)}`;
      drawing.append(make("rect", { class: "hist", x: x - width / 2, y: 122 - height, width, height: Math.max(height, count ? 1.5 : 0),
        rx: 2, onclick: () => pick(from, to) }, make("title", {}, `reward ${name}: ${count}`)));
      if (bins.length <= 8) drawing.append(make("text", { x, y: 116 - height, "text-anchor": "middle" }, count.toLocaleString("en")));
      if (bins.length <= 8 || i % 4 === 0) drawing.append(make("text", { x, y: 140, "text-anchor": "middle" }, format(from)));
    });
    drawing.append(make("line", { class: "axis", x1: 5, x2: 325, y1: 122.5, y2: 122.5 }));
  }
  return { card, draw };
}

function rolloutRow(row) {
  const snippet = (text) => visible(String(text ?? "").slice(0, 300)).replaceAll("\n", " ↵ ");
  const where = row.phase && row.phase !== "rl" ? `${row.phase.replace("_", " ")} ${row.step}` : `step ${row.step}`;
  const level = make("span", { class: "dim" }, row.level === null || row.level === undefined ? "" : `level ${row.level}`);
  const summary = make("summary", {},
    ...(row.label ? [make("span", { class: "dim" }, visible(row.label))] : [make("span", { class: "dim" }, where), level]),
    make("span", { class: `chip ${isCorrect(row) ? "good" : ""}`, title: isCorrect(row) ? "correct" : "wrong" }, format(row.reward)),
    make("span", { class: "dim" }, isNumber(row.num_tokens) ? `${row.num_tokens.toLocaleString("en")} tokens` : ""),
    make("span", { class: "snip mono" }, snippet(row.prompt)),
    make("span", { class: "snip mono" }, snippet(row.response)));
  const node = make("details", { class: row.label ? "row labelled" : "row" }, summary);
  // Filled when it first opens: a page of long rollouts would otherwise make tens of thousands of elements.
  const fill = () => { if (node.children.length === 1) node.append(rolloutDetail(row)); };
  const key = rolloutKey(row);
  node.addEventListener("toggle", () => {
    if (node.open) fill();
    if (node.open) rolloutView.open.add(key); else rolloutView.open.delete(key);
  });
  if (rolloutView.open.has(key)) { fill(); node.open = true; }
  return node;
}

// The pictures of the prompt, numbered as its marks. The page's policy lets nothing but data be an image.
function pictures(row) {
  const images = Array.isArray(row.images) ? row.images : [];
  if (!images.length) return null;
  const one = (source, i) => make("img", { src: source, alt: `picture ${i + 1} of the prompt`, loading: "lazy" });
  return make("div", {}, make("h4", {}, images.length > 1 ? "Pictures" : "Picture"), make("div", { class: "pictures" }, ...images.map(one)));
}

function rolloutDetail(row) {
  const shown = new Set(["step", "phase", "prompt", "response", "answer", "reward", "advantage", "num_tokens", "level", "stopped", "index",
    "haystack", "reach", "silent", "meanEntropy", "images", "rank", "label", "blame/largest"]);
  // The responses of an update taken apart have neither an answer nor an end.
  const isBlamed = row.rank !== undefined;
  const facts = [["reward", isNumber(row.reward) ? String(row.reward) : "–"], ["advantage", format(row.advantage)]];
  if (!isBlamed) facts.unshift(["answer", visible(row.answer)]);
  if (!isBlamed) facts.push(["ended", row.stopped === false ? "cut at the token budget" : row.stopped ? "by itself" : "–"]);
  if (isNumber(row.reach)) facts.push(["largest |log-ratio|", format(row.reach)]);
  if (isNumber(row.silent)) facts.push(["tokens without gradient", `${row.silent} of ${row.gate_weight.filter(isNumber).length}`]);
  if (isNumber(row.meanEntropy)) facts.push(["mean entropy", `${format(row.meanEntropy)} nats`]);
  for (const [name, value] of Object.entries(row)) {
    if (!shown.has(name) && value !== null && typeof value !== "object") facts.push([name, visible(value)]);
  }
  const block = (title, text) => make("div", {}, make("h4", {}, title), make("pre", {}, visible(text)));
  return make("div", { class: "detail" },
    make("dl", { class: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    pictures(row), block("Prompt", row.prompt), block("Response", row.response), heatMap(row));
}
