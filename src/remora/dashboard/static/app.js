// The page: finds out from its address what to show, follows the stream of it, and draws the frame around it.

import { html, render, useEffect, useMemo, useRef, useState } from "/static/htm-preact.js";
import { address, plural, time } from "/static/format.js";
import { PAGES } from "/static/pages.js";
import { Empty, go, Place } from "/static/ui.js";

const NAV = [
  ["overview", "Overview", "o"], ["calls", "Calls", "c"], ["waiting", "Waiting", "w"], ["timeline", "Timeline", "t"],
  ["references", "References", "r"], ["links", "Links", "l"], ["gradients", "Gradients", "g"], ["events", "Events", "e"],
  ["stacks", "Stacks", "s"], ["functions", "Functions", "f"],
];
const KEYS = [
  ["o c w t r l g e s f", "open a page (its letter is underlined)"], ["j k", "next, previous row"], ["Enter", "open the row"],
  ["/", "filter"], ["Backspace", "back"], ["p", "pause, go on"], ["d", "dark, light"], ["+ − ← → 0", "timeline: zoom, move, now"], ["?", "this list"],
];

function here() {
  const [page, ...path] = location.pathname.split("/").slice(1).map(decoded);
  return { page: page || "overview", path: path.filter(Boolean), query: Object.fromEntries(new URLSearchParams(location.search)), href: location.pathname + location.search };
}

// A part of an address as it was meant; one that is no text at all as it stands.
function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

// What the server tells of this address: { data, state, problem }. Nothing is asked for while the page is hidden or paused.
function useStream(place, paused) {
  const [shown, setShown] = useState({ state: "loading" });
  const [hidden, setHidden] = useState(document.hidden);
  const thing = [place.page, ...place.path].join("\n");
  useEffect(() => {
    const look = () => setHidden(document.hidden);
    document.addEventListener("visibilitychange", look);
    return () => document.removeEventListener("visibilitychange", look);
  }, []);
  useEffect(() => {
    setShown((before) => (before.thing === thing ? before : { thing, state: "loading", head: before.data || before.head }));
  }, [thing]);
  useEffect(() => {
    if (hidden || paused) return;
    const source = new EventSource("/stream" + address(place.page, ...place.path) + location.search);
    source.onmessage = (message) => setShown({ thing, state: "live", data: JSON.parse(message.data) });
    source.addEventListener("problem", (message) => setShown((before) => ({ ...before, state: "problem", problem: JSON.parse(message.data) })));
    source.onerror = () => setShown((before) => ({ ...before, state: source.readyState === EventSource.CLOSED ? "refused" : "away" }));
    return () => source.close();
  }, [place.href, hidden, paused]);
  return shown;
}

function usePlace() {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const look = () => setPlace(here());
    const click = (event) => {
      const link = event.target.closest?.("a[href]");
      if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
      const url = new URL(link.href, location.href);
      if (url.origin !== location.origin || link.hasAttribute("download")) return;
      event.preventDefault();
      go(url.pathname + url.search);
    };
    addEventListener("popstate", look);
    addEventListener("navigate-to", look);
    document.addEventListener("click", click);
    return () => { removeEventListener("popstate", look); removeEventListener("navigate-to", look); document.removeEventListener("click", click); };
  }, []);
  const setQuery = (changes) => {
    const query = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(changes)) value === "" || value == null ? query.delete(key) : query.set(key, value);
    const text = query.toString();
    history.replaceState(null, "", location.pathname + (text ? "?" + text : ""));
    setPlace(here());
  };
  return useMemo(() => ({ ...place, setQuery }), [place]);
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("remora-theme", root.dataset.theme); } catch { /* not kept */ }
  dispatchEvent(new Event("themechange"));
}

function useKeys(act) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    const press = (event) => {
      if (event.metaKey || event.ctrlKey || event.altKey) return;
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
      if (typing && event.key === "Escape") event.target.blur();
      else if (!typing && latest.current(event.key)) event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function moveRow(step) {
  const links = [...document.querySelectorAll("tbody tr")].map((row) => row.querySelector("a")).filter(Boolean);
  if (!links.length) return;
  const at = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
  links[Math.min(Math.max(at + step, 0), links.length - 1)].focus();
}

function App() {
  const place = usePlace();
  const [paused, setPaused] = useState(false);
  const [help, setHelp] = useState(false);
  const shown = useStream(place, paused);
  useKeys((key) => {
    const page = NAV.find(([, , letter]) => letter === key);
    if (page) go(page[0] === "overview" ? "/" : address(page[0]));
    else if (key === "j" || key === "k") moveRow(key === "j" ? 1 : -1);
    else if (key === "/") document.querySelector(".filter")?.focus();
    else if (key === "Backspace") history.back();
    else if (key === "p") setPaused(!paused);
    else if (key === "d") toggleTheme();
    else if (key === "?") setHelp(!help);
    else if (key === "Escape") setHelp(false);
    else return false;
    return true;
  });
  const head = shown.data || shown.head;
  useEffect(() => {
    const label = NAV.find(([page]) => page === place.page)?.[1] || "Worker";
    const trouble = head && (head.cycles || head.answered < head.all) ? "⚠ " : "";
    document.title = `${trouble}${place.path.join(" ") || label} · Remora`;
  }, [place.href, head?.cycles, head?.answered, head?.all]);
  const Page = PAGES[place.page];
  return html`<${Place.Provider} value=${place}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>To the content</a>
    <nav aria-label="Pages"><a class="brand" href="/"><img src="/static/icon.svg" alt="" width="26" height="26" />Remora</a>
      ${NAV.map(([page, label, letter]) => html`<a href=${page === "overview" ? "/" : address(page)} aria-current=${place.page === page ? "page" : undefined} class=${page === "waiting" && head?.cycles ? "alarm" : ""}>${underlined(label, letter)}${page === "waiting" && head?.cycles ? html`<em>${head.cycles}</em>` : ""}</a>`)}
    </nav>
    <div class="body">
      <${Head} head=${head} shown=${shown} paused=${paused} setPaused=${setPaused} setHelp=${setHelp} />
      <main id="main" tabindex="-1" class=${shown.state === "live" ? "" : "stale"} data-state=${shown.state} data-thing=${shown.data ? shown.thing : ""}>
        ${shown.data && shown.data.page === place.page ? html`<${Page} ...${shown.data} />` : html`<${Waiting} shown=${shown} />`}
      </main>
    </div>
    ${help && html`<div class="veil" onClick=${() => setHelp(false)}><dialog open aria-modal="true" aria-label="Keys" onClick=${(event) => event.stopPropagation()}><h2>Keys</h2><dl>${KEYS.map(([keys, what]) => html`<div><dt>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${what}</dd></div>`)}</dl><button ref=${(button) => button?.focus()} onClick=${() => setHelp(false)}>Close</button></dialog></div>`}
  <//>`;
}

function underlined(label, letter) {
  const at = label.toLowerCase().indexOf(letter);
  return html`<span>${label.slice(0, at)}<u>${label[at]}</u>${label.slice(at + 1)}</span>`;
}

function Head({ head, shown, paused, setPaused, setHelp }) {
  const state = paused ? "paused" : shown.state;
  const words = { live: "live", loading: "asking", paused: "paused", problem: "no answer", away: "no connection", refused: "not let in" }[state];
  return html`<header class="top">
      <span class="group" title=${head ? `${head.program} (group ${head.group})` : ""}>${head ? head.program || "group" : "…"}<span class="note">${head ? head.group.slice(0, 8) : ""}</span></span>
      ${head && html`<span class="answered ${head.answered < head.all ? "bad" : ""}">${head.answered} of ${plural(head.all, "worker")} answered</span>`}
      <span class="spacer"></span>
      <span class="pulse ${state}" title=${head ? `as of ${time(head.time)}` : ""}><i></i>${words}<span class="clock">${head ? time(head.time) : ""}</span></span>
      <button class="quiet" onClick=${() => setPaused(!paused)} title="p">${paused ? "Go on" : "Pause"}</button>
      <button class="quiet" onClick=${toggleTheme} title="d" aria-label="Dark or light">◐</button>
      <button class="quiet" onClick=${() => setHelp(true)} title="?" aria-label="Keys">?</button>
    </header>
    ${head && head.missing.length > 0 && html`<div class="banner warn" role="status"><strong>A partial picture.</strong> ${head.missing.slice(0, 4).map(([name, is, why], at) => html`${at ? "; " : ""}<a href=${address("workers", name)}>${name}</a> is ${is}${why ? `: ${why}` : ""}`)}${head.missing.length > 4 ? `; and ${head.all - head.answered - 4} more` : ""}.</div>`}
    ${head && head.cycles > 0 && html`<div class="banner bad" role="alert"><strong>${plural(head.cycles, "cycle")}.</strong> Calls wait for each other and will not go on. <a href="/waiting">Show what waits for what</a></div>`}
    ${shown.state === "problem" && html`<div class="banner bad" role="alert"><strong>The group does not answer.</strong> ${shown.problem}</div>`}
    ${shown.state === "away" && html`<div class="banner warn" role="status"><strong>The dashboard does not answer.</strong> Trying again; what you see is from before.</div>`}
    ${shown.state === "refused" && html`<div class="banner bad" role="alert"><strong>This page is not let in any more.</strong> The dashboard was started anew: open the address that it printed.</div>`}`;
}

function Waiting({ shown }) {
  if (shown.state === "problem") return html`<${Empty} title="Nothing to show">The group did not answer yet. This page goes on asking.<//>`;
  if (shown.state === "refused") return html`<${Empty} title="Nothing to show">Press Enter in the terminal where the dashboard runs: it prints a new address.<//>`;
  return html`<div class="loading" aria-label="Asking the workers"><div></div><div></div><div></div></div>`;
}

render(html`<${App} />`, document.body);
