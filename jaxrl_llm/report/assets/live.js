"use strict";

// Follows runs that are in progress: asks for the page's data every few seconds and draws what has changed.

const live = { every: pageData().every_ms, kind: pageData().kind, version: pageData().version, last: new Date() };
const badge = make("div", { class: "live", role: "status" });

function say(text, tone) {
  badge.textContent = text;
  badge.className = `live ${tone}`;
}

async function refresh() {
  let answer;
  try {
    answer = await fetch("data", { headers: { "If-None-Match": live.version }, cache: "no-store" });
  } catch {
    say(`not connected; these are the numbers of ${live.last.toLocaleTimeString()}`, "bad");
    return;
  }
  if (answer.status !== 304 && !answer.ok) {
    say(`the server cannot read the run: ${visible((await answer.text()).slice(0, 300))}`, "bad");
    return;
  }
  live.last = new Date();
  if (answer.status !== 304) {
    const data = await answer.json();
    if (data.kind !== live.kind) { location.reload(); return; }
    const [x, y] = [window.scrollX, window.scrollY];
    showPage(data);
    window.scrollTo(x, y);
    live.version = data.version;
    live.ended = data.ended;
  }
  say(live.ended ? "ended" : "live", live.ended ? "" : "good");
}

async function follow() {
  // A page that nobody sees costs nothing.
  if (!document.hidden) {
    try { await refresh(); } catch (error) { say(`the page could not be drawn: ${error.message}`, "bad"); }
  }
  setTimeout(follow, live.every);
}

live.ended = pageData().ended;
document.body.append(badge);
say(live.ended ? "ended" : "live", live.ended ? "" : "good");
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setTimeout(follow, live.every);
