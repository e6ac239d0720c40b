"use strict";

// A conversation with the checkpoint. Text goes in as text nodes only: nothing here parses HTML.

const REACH = 5;  // Nats of surprise that the strongest colour stands for.
const get = (id) => document.getElementById(id);
const conversation = [];  // {role, content}, as the service gets them.
let model = null, hasTemplate = true, request = null;

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// Text with every control or invisible formatting character as its escape.
function visible(text) {
  return String(text ?? "").replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
}

function show(status, tone = "") {
  get("status").textContent = status;
  get("status").className = `pill ${tone}`;
}

function headers() {
  const key = get("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// What went wrong, in the service's own words where it sent some.
async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the service answered with status ${response.status}`;
  }
}

async function connect() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await reasonOf(response));
    const card = (await response.json()).data[0];
    model = card.id;
    hasTemplate = card.has_chat_template !== false;
    get("model").textContent = visible(model);
    document.title = `${visible(model)} – jaxrl_llm`;
    const how = hasTemplate ? "" : " · no chat template: each message is a prompt of its own";
    get("facts").textContent = `${Number(card.max_model_len).toLocaleString("en")} tokens of context${how}`;
    get("system").disabled = !hasTemplate;
    // Half of the context, so that there is room for what was said before.
    get("max_tokens").value ||= Math.min(512, Math.floor(card.max_model_len / 2));
    show("ready", "good");
  } catch (error) {
    show(visible(error.message), "bad");
  }
}

// Calls `on` with the value of each event of a stream.
async function readEvents(response, on) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const lines = (text + value).split("\n");
    text = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      on(JSON.parse(line.slice(6)));
    }
  }
}

// Tokens in whatever format the chunk has them: [{id, text, bytes, logprob}].
function tokensOf(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) return [];
  const ids = choice.token_ids || [];
  if (logprobs.content) return logprobs.content.map((x, i) => ({ id: ids[i], text: x.token, bytes: x.bytes, logprob: x.logprob }));
  return logprobs.tokens.map((text, i) => ({ id: ids[i], text, bytes: null, logprob: logprobs.token_logprobs[i] }));
}

function addTurn(role) {
  const turn = make("article", `turn ${role}`);
  get("talk").append(turn);
  return turn;
}

// The tokens of one answer, each with its log-probability.
function makeAnswer() {
  const turn = addTurn("assistant"), box = make("div", "tokens"), end = make("p", "end");
  const decoder = new TextDecoder();  // A character may span tokens: it appears at its last one.
  let count = 0;
  turn.append(box, end);

  function add(token) {
    count += 1;
    const text = token.bytes ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.text;
    const span = make("span", text ? "" : "unseen", visible(text) || "◌");
    const share = Math.min(Math.max(-token.logprob / REACH, 0), 1);
    if (share) span.style.background = `rgba(var(--heat), ${(0.85 * share).toFixed(3)})`;
    const chance = `log-probability ${token.logprob.toFixed(4)} (p = ${Math.exp(token.logprob).toPrecision(3)})`;
    span.dataset.note = `token ${count}, “${visible(token.text).replaceAll("\n", "↵")}”, id ${token.id ?? "unknown"}, ${chance}`;
    box.append(span);
  }
  return {
    turn, add,
    close(text, isBad) { end.textContent = visible(text); end.className = isBad ? "end bad" : "end"; },
    count: () => count,
  };
}

function settings() {
  const number = (id) => (get(id).value === "" ? undefined : Number(get(id).value));
  return {
    model, temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
    stream: true, return_token_ids: true,
  };
}

async function draw() {
  const system = get("system").value.trim();
  const head = system ? [{ role: "system", content: system }] : [];
  const path = hasTemplate ? "/v1/chat/completions" : "/v1/completions";
  const asked = hasTemplate ? { messages: [...head, ...conversation.filter((turn) => turn.content)], logprobs: true } : { prompt: conversation.at(-1).content, logprobs: 1 };
  const answer = makeAnswer();
  let content = "", reason = null;
  request = new AbortController();
  setBusy(true);
  try {
    const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify({ ...settings(), ...asked }), signal: request.signal });
    if (!response.ok) throw new Error(await reasonOf(response));
    await readEvents(response, (event) => {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        content += (choice.delta ? choice.delta.content : choice.text) ?? "";
        tokensOf(choice).forEach(answer.add);
        reason = choice.finish_reason ?? reason;
      }
    });
    answer.close(`${answer.count()} tokens, ended by ${reason === "length" ? "the limit" : "itself"}`);
    show("ready", "good");
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.close(stopped ? `${answer.count()} tokens, stopped` : error.message, !stopped);
  } finally {
    request = null;
    setBusy(false);
  }
  conversation.push({ role: "assistant", content });
}

function setBusy(isBusy) {
  for (const id of ["send", "clear", "key"]) get(id).disabled = isBusy;
  get("stop").disabled = !isBusy;
  get("again").disabled = isBusy || !conversation.length;
}

get("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = get("message").value;
  if (request || !text.trim()) return;
  get("message").value = "";
  conversation.push({ role: "user", content: text });
  addTurn("user").textContent = visible(text);
  draw();
});

get("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    get("ask").requestSubmit();
  }
});

get("stop").addEventListener("click", () => request && request.abort());

get("again").addEventListener("click", () => {
  if (request || !conversation.length) return;
  conversation.pop();
  get("talk").lastChild.remove();
  draw();
});

get("clear").addEventListener("click", () => {
  conversation.length = 0;
  get("talk").replaceChildren();
  setBusy(false);
});

get("settings").addEventListener("submit", (event) => event.preventDefault());
get("key").addEventListener("change", connect);

function tell(event) {
  const note = event.target.dataset && event.target.dataset.note;
  if (note === undefined) return;
  for (const span of document.querySelectorAll(".here")) span.classList.remove("here");
  event.target.classList.add("here");
  get("readout").textContent = note;
}
get("talk").addEventListener("pointerover", tell);
get("talk").addEventListener("click", tell);

connect();
