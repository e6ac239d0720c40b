"use strict";

// The page: head, curves, rollouts, config.

function showHead(host, header) {
  const title = visible([header.objective, header.task].filter(Boolean).join(" on ") || header.workdir);
  const status = visible(header.status);
  const good = /^(done|finished|complete|ok|success)/i.test(status);
  const tone = /fail|error|crash|nan|diverg|stop|not finite|interrupt|died/i.test(status) ? "bad" : good ? "good" : "";
  document.title = `${title} – jaxrl_llm`;
  const params = isNumber(header.num_params) ? `, ${format(header.num_params)} parameters` : "";
  const sub = [header.model && `model ${header.model}${params}`, header.device, header.attempts > 1 && `${header.attempts} attempts`,
    header.started && `started ${header.started}`,
    header.branched_from && `branched from ${header.branched_from.workdir} after RL step ${header.branched_from.step}`,
    header.finished && `ended ${header.finished}`, `workdir ${header.workdir}`];
  host.append(make("div", { class: "title" }, make("h1", {}, title), make("span", { class: `pill ${tone}` }, status)),
    make("p", { class: "sub" }, sub.filter(Boolean).map(visible).join(" · ")),
    make("dl", { class: "tiles" }, ...tiles(header)));
  if (header.command) host.append(commandLine(String(header.command)));
}

function tiles(header) {
  const tile = (name, ...value) => make("div", {}, make("dt", {}, name), make("dd", {}, ...value));
  const small = (text) => make("small", {}, ` ${text}`);
  const out = [];
  if (isNumber(header.accuracy_final)) {
    const gain = header.accuracy_final - (header.accuracy_start ?? header.accuracy_final);
    const change = `${gain >= 0 ? "+" : "−"}${Math.abs(100 * gain).toFixed(1)} points`;
    const points = make("small", { class: gain < 0 ? "down" : gain > 0 ? "up" : "" }, ` ${change}`);
    const start = isNumber(header.accuracy_start) ? `${format(header.accuracy_start, "%")} → ` : "";
    out.push(tile("Held-out accuracy, start → final", `${start}${format(header.accuracy_final, "%")}`, points));
  }
  if (isNumber(header.num_steps)) {
    const short = isNumber(header.planned_steps) && header.planned_steps !== header.num_steps;
    const planned = short ? small(`of ${header.planned_steps.toLocaleString("en")}`) : null;
    out.push(tile("RL steps", header.num_steps.toLocaleString("en"), planned));
  }
  if (isNumber(header.wall_seconds)) out.push(tile("Wall time", formatSeconds(header.wall_seconds)));
  if (isNumber(header.warm_start_seconds)) out.push(tile("Warm start", formatSeconds(header.warm_start_seconds)));
  if (isNumber(header.rl_seconds)) out.push(tile("RL", formatSeconds(header.rl_seconds)));
  if (isNumber(header.tokens)) out.push(tile("Tokens", format(header.tokens)));
  if (isNumber(header.peak_memory_gb)) out.push(tile("Peak memory", format(header.peak_memory_gb), small("GB")));
  if (isNumber(header.skipped_steps)) out.push(tile("Skipped updates", header.skipped_steps.toLocaleString("en")));
  const alarms = Object.entries(header.alarms || {}).filter(([, count]) => isNumber(count));
  if (alarms.length) {
    const names = alarms.map(([name, count]) => `${visible(name.replaceAll("_", " "))}${count > 1 ? ` × ${count}` : ""}`);
    out.push(tile("Alarms", String(alarms.reduce((sum, [, count]) => sum + count, 0)), small(names.join(", "))));
  }
  return out;
}

function commandLine(command) {
  const button = make("button", { type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(command); button.textContent = "Copied"; } catch { button.textContent = "Select it manually"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return make("div", { class: "command" }, make("code", {}, visible(command)), button);
}

function showConfig(host, config, versions) {
  const names = Object.keys(config), packages = Object.entries(versions);
  if (!names.length && !packages.length) return;
  const cards = [];
  const rows = names.map((name) => {
    const value = config[name];
    const text = value === null ? "None" : visible(typeof value === "string" ? value : JSON.stringify(value));
    return make("tr", {}, make("td", { class: "mono" }, name), make("td", { class: `mono ${value === null ? "unset" : ""}` }, text));
  });
  const search = make("input", { type: "search", placeholder: "name or value", "aria-label": "search the config", oninput: () => {
    const words = search.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(words);
  } });
  if (rows.length) cards.push(make("div", { class: "card" }, make("table", {}, make("tbody", {}, ...rows))));
  if (packages.length) {
    const lines = packages.map(([name, version]) => make("tr", {}, make("td", {}, name), make("td", { class: "mono" }, visible(version))));
    cards.push(make("div", { class: "card" }, make("table", {}, make("tbody", {}, ...lines))));
  }
  const title = rows.length ? `Config${packages.length ? " and versions" : ""}` : "Versions";
  host.append(make("div", { class: "bar" }, make("h2", {}, title), rows.length ? search : null),
    make("div", { class: `tables ${cards.length === 1 ? "single" : ""}` }, ...cards));
}

function showPage(data) {
  showSection("head", [data.header, data.notes], (host) => {
    showHead(host, data.header);
    if (data.notes.length) host.append(make("ul", { class: "notes" }, ...data.notes.map((note) => make("li", {}, note))));
  });
  if (data.phases) showSection("curves", data.phases, (host) => showCurves(host, data.phases));
  showSection("rollouts", data.samples, (host) => showRollouts(host, data.samples));
  showSection("config", [data.config, data.versions], (host) => showConfig(host, data.config, data.versions));
  const sections = [["curves", "Curves"], ["rollouts", "Rollouts"], ["config", "Config"]];
  const filled = sections.filter(([id]) => document.getElementById(id).children.length);
  showSection("nav", filled, (host) => host.append(...filled.map(([id, name]) => make("a", { href: `#${id}` }, name))));
  showSection("foot", data.source ?? "", (host) => host.append(
    `Made by jaxrl_llm from ${visible(data.made_from ?? "metrics.jsonl, samples.jsonl, config.json and summary.json")}. ${data.source ?? "This page needs no network."}`));
}

showPage(pageData());
