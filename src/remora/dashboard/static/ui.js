// The pieces that all pages are made of: links, states, tiles, tables. All text goes through Preact, which escapes it.

import { createContext, html, useContext, useEffect, useRef, useState } from "/static/htm-preact.js";
import { address, bytes, count, csv, percent, rate, seconds, time } from "/static/format.js";

// The address that is shown: { page, path, query, setQuery }.
export const Place = createContext(null);

// Shows another page, without loading anything but its stream.
export function go(href) {
  history.pushState(null, "", href);
  scrollTo(0, 0);
  dispatchEvent(new Event("navigate-to"));
}

const GOOD = new Set(["alive", "ready", "joined", "recovered", "connected", "confirmed"]);
const BUSY = new Set(["busy", "suspected", "queued", "unsent", "paused", "being made", "disconnected", "lock", "pool", "link", "fault"]);
const BAD = new Set(["dead", "silent", "unreachable", "refused", "failed", "died", "call failed", "run failed"]);

export function tone(state) {
  return GOOD.has(state) ? "good" : BUSY.has(state) ? "warn" : BAD.has(state) ? "bad" : "calm";
}

export function State({ value }) {
  return value ? html`<span class="state ${tone(value)}"><i></i>${value}</span>` : "";
}

export function Tile({ label, value, note, href, bad }) {
  const inside = html`<span class="label">${label}</span><strong>${value}</strong><span class="note">${note || ""}</span>`;
  return href ? html`<a class="tile ${bad ? "bad" : ""}" href=${href}>${inside}</a>` : html`<div class="tile ${bad ? "bad" : ""}">${inside}</div>`;
}

export function Card({ title, note, children, actions, wide, id }) {
  return html`<section class="card ${wide ? "wide" : ""}" id=${id}>
    ${title && html`<header><h2>${title}</h2>${note && html`<span class="note">${note}</span>`}<span class="actions">${actions}</span></header>`}
    ${children}
  </section>`;
}

// What a page says where there is nothing to show: what it would show, and when.
export function Empty({ title, children }) {
  return html`<div class="empty"><strong>${title}</strong><p>${children}</p></div>`;
}

export function Spark({ values }) {
  const known = (values || []).filter((value) => value != null);
  if (known.length < 2) return html`<svg class="spark" viewBox="0 0 100 24"></svg>`;
  const most = Math.max(...known, 1e-9) * 1.3, step = 100 / (values.length - 1);
  let path = "", pen = "M";
  values.forEach((value, at) => {
    if (value == null) { pen = "M"; return; }
    path += `${pen}${(at * step).toFixed(1)} ${(22 - (value / most) * 20).toFixed(1)}`;
    pen = "L";
  });
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true"><path d=${path} /></svg>`;
}

function Meter({ value }) {
  if (!value) return "–";
  const [now, limit] = value;
  const share = limit ? Math.min(now / limit, 1) : 0;
  return html`<span class="meter ${share >= 1 ? "full" : ""}" title=${`${now} of ${limit}`}><i style=${{ width: `${share * 100}%` }}></i><b>${now}/${limit}</b></span>`;
}

function Names({ values }) {
  if (!values || !values.length) return "–";
  return html`<span class="names">${values.slice(0, 4).map((name) => html`<a href=${address("workers", name)}>${name}</a> `)}${values.length > 4 ? html`<span class="note">and ${values.length - 4} more</span>` : ""}</span>`;
}

// By the kind of a column: how its value is drawn, and whether it stands at the right.
const CELLS = {
  text: (value) => value ?? "",
  worker: (value) => (value ? html`<a href=${address("workers", value)}>${value}</a>` : "–"),
  workers: (value) => html`<${Names} values=${value} />`,
  call: (value) => (value ? html`<a class="mono" href=${address("calls", value)}>${value}</a>` : "–"),
  function: (value) => (value ? html`<a class="mono" href=${address("functions", value)} title=${value}>${value}</a>` : "–"),
  reference: (value) => html`<a class="mono" href=${address("references", value)}>${value}</a>`,
  pass: (value) => html`<a class="mono" href=${address("gradients", value)}>${value}</a>`,
  thread: (value) => (value ? html`<a class="mono" href=${address("stacks", value[0], value[1])}>${value[1]}</a>` : "–"),
  link: (value) => html`<a href=${address("links", value[0], value[1])}>${value[0]} → ${value[1]}</a>`,
  state: (value) => html`<${State} value=${value} />`,
  seconds: (value) => seconds(value),
  bytes: (value) => bytes(value),
  count: (value) => count(value),
  rate: (value) => rate(value),
  percent: (value) => percent(value),
  time: (value) => time(value),
  spark: (value) => html`<${Spark} values=${value} />`,
  bar: (value) => html`<${Meter} value=${value} />`,
};
const RIGHT = new Set(["seconds", "bytes", "count", "rate", "percent"]);

function keyOf(row, at) {
  return row.key ?? row.id ?? (row.link ? row.link.join("\n") : null) ?? (row.time == null ? row.worker ?? row.function : null) ?? at;
}

// `live`: the order and the filter are in the address, and the server obeys them.
export function Table({ table, live, empty }) {
  const place = useContext(Place);
  const { rows } = table;
  // A column in which nothing is said takes no room.
  const columns = table.columns.filter(({ key, kind }) => (kind !== "text" && key !== "paused") || !rows.length || rows.some((row) => row[key]));
  if (!rows.length && !(live && place.query.filter)) return empty || html`<${Empty} title="Nothing here">${""}<//>`;
  const sort = (column) => {
    const mine = table.sort === column.key;
    place.setQuery({ sort: mine && !table.descending ? "" : mine ? column.key : "-" + column.key });
  };
  const head = (column) => {
    const mine = live && table.sort === column.key;
    const order = mine ? (table.descending ? "descending" : "ascending") : undefined;
    const label = live && column.kind !== "spark"
      ? html`<button onClick=${() => sort(column)}>${column.label}<span aria-hidden="true">${mine ? (table.descending ? " ↓" : " ↑") : ""}</span></button>`
      : column.label;
    return html`<th class="${RIGHT.has(column.kind) ? "right" : ""} ${column.narrow ? "" : "extra"}" title=${column.hint || undefined} aria-sort=${order} scope="col">${label}</th>`;
  };
  return html`<div class="table">
    ${live && html`<${Filter} />`}
    <div class="scroll"><table>
      <thead><tr>${columns.map(head)}</tr></thead>
      <tbody>${rows.map((row, at) => html`<tr key=${keyOf(row, at)}>${columns.map((column) => html`<td class="${RIGHT.has(column.kind) ? "right" : ""} ${column.narrow ? "" : "extra"} is-${column.kind}">${CELLS[column.kind](row[column.key])}</td>`)}</tr>`)}</tbody>
    </table></div>
    <footer><span class="note">${rows.length < table.total ? `${count(rows.length)} of ${count(table.total)} shown` : `${count(rows.length)} shown`}</span><${CopyCsv} table=${table} /></footer>
  </div>`;
}

function Filter() {
  const place = useContext(Place);
  const [text, setText] = useState(place.query.filter || "");
  const timer = useRef(null);
  const change = (event) => {
    const value = event.currentTarget.value;
    setText(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => place.setQuery({ filter: value }), 200);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  return html`<input class="filter" type="search" placeholder="Filter ( / )" aria-label="Filter" value=${text} onInput=${change} />`;
}

function CopyCsv({ table }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    const text = csv(table);
    try {
      await navigator.clipboard.writeText(text);
      setSaid("Copied");
    } catch { // no clipboard where the page came by plain HTTP from another host: a file does as well
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.download = `remora-${table.name.replaceAll(" ", "-")}.csv`;
      link.click();
      URL.revokeObjectURL(link.href);
      setSaid("Saved");
    }
    setTimeout(() => setSaid(""), 1500);
  };
  return html`<button class="quiet" onClick=${copy} title="All rows that are shown, as comma-separated values">${said || "Copy CSV"}</button>`;
}

export function Stack({ lines }) {
  if (!lines || !lines.length) return html`<p class="note">No stack is known.</p>`;
  return html`<ol class="stack">${[...lines].reverse().map((line, at) => {
    const cut = line.lastIndexOf(" ");
    return html`<li class=${at === 0 ? "inner" : ""}>${cut > 0 ? html`<b>${line.slice(cut + 1)}</b> <span>${line.slice(0, cut)}</span>` : line}</li>`;
  })}</ol>`;
}

export function Facts({ pairs }) {
  return html`<dl class="facts">${pairs.filter(([, value]) => value != null && value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function Choice({ label, value, options, onChange }) {
  return html`<span class="choice" role="group" aria-label=${label}>${options.map(([key, name]) => html`<button aria-pressed=${key === value} onClick=${() => onChange(key)}>${name}</button>`)}</span>`;
}
