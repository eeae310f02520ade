// Links as a matrix: a row for each sender, a column for each receiver, the colour says how much.

import { html, useRef, useState } from "/static/htm-preact.js";
import { address, bytes, count, seconds } from "/static/format.js";
import { Canvas, color } from "/static/charts.js";
import { go } from "/static/ui.js";

export const METRICS = {
  rate: ["Bytes a second", (value) => `${bytes(value)}/s`], round_trip: ["Round trip", seconds], queued: ["Queued", bytes],
  sent: ["Bytes sent", bytes], reconnects: ["Reconnects", count],
};

export function Matrix({ matrix, metric, query }) {
  const [tip, setTip] = useState(null);
  const canvas = useRef(null);
  const { labels, cells, bad, most, size } = matrix;
  const letters = Math.min(Math.max(...labels.map((label) => label.length)), 14), named = labels.length <= 40;
  const left = named ? 24 + 6.5 * letters : 16, top = named ? 16 + 6 * letters : 16, right = named ? 3.5 * letters : 0;
  const side = Math.max(6, Math.min(38, Math.floor(640 / labels.length)));
  const least = Math.min(...cells.flat().filter((cell) => cell > 0), most || 1);
  const broken = new Set(bad.map(([at, to]) => `${at} ${to}`));
  const draw = (context, width) => {
    const cell = Math.min(side, (width - left - right) / labels.length);
    context.font = "11px system-ui";
    context.textBaseline = "middle";
    const text = color("faint"), none = color("line"), red = color("bad");
    cells.forEach((line, at) => line.forEach((value, to) => {
      context.fillStyle = value == null ? none : shade(value, least, most);
      context.globalAlpha = value == null ? 0.35 : 1;
      context.fillRect(left + to * cell, top + at * cell, cell - 1, cell - 1);
      context.globalAlpha = 1;
      if (broken.has(`${at} ${to}`)) {
        context.strokeStyle = red;
        context.lineWidth = 2;
        context.strokeRect(left + to * cell + 1, top + at * cell + 1, cell - 3, cell - 3);
      }
    }));
    if (!named) return;
    context.fillStyle = text;
    labels.forEach((label, at) => {
      context.textAlign = "right";
      context.fillText(cut(label), left - 6, top + (at + 0.5) * cell, left - 8);
      context.save();
      context.translate(left + (at + 0.5) * cell, top - 6);
      context.rotate(-Math.PI / 3);
      context.textAlign = "left";
      context.fillText(cut(label), 0, 0);
      context.restore();
    });
  };
  const find = (event) => {
    const cell = Math.min(side, (canvas.current.clientWidth - left - right) / labels.length);
    const box = canvas.current.getBoundingClientRect();
    const at = Math.floor((event.clientY - box.top - top) / cell), to = Math.floor((event.clientX - box.left - left) / cell);
    return labels[at] != null && labels[to] != null ? { at, to, x: event.clientX - box.left, y: event.clientY - box.top } : null;
  };
  const open = (event) => {
    const found = find(event);
    if (!found) return;
    if (size === 1) go(address("links", labels[found.at], labels[found.to]));
    else query({ block: `${Math.min(found.at, found.to) * size}-${(Math.max(found.at, found.to) + 1) * size - 1}` });
  };
  const [, format] = METRICS[metric];
  const value = tip && cells[tip.at]?.[tip.to];
  return html`<div class="matrix">
    <${Canvas} height=${top + side * labels.length + 4} what=${matrix} draw=${draw} onReady=${(element) => (canvas.current = element)} onMouseMove=${(event) => setTip(find(event))} onMouseLeave=${() => setTip(null)} onClick=${open} role="img" aria-label="Links by sender and receiver; the table below says the same" />
    ${tip && html`<div class="tip" style=${{ left: `${tip.x + 14}px`, top: `${tip.y + 10}px` }}><b>${labels[tip.at]} → ${labels[tip.to]}</b> ${value == null ? "no link" : format(value)}</div>`}
    <div class="scale"><span>${format(least)}</span><i></i><span>${format(most)}</span>${bad.length > 0 && html`<span class="frame">peer suspected or gone</span>`}${size > 1 && html`<span>a cell is the worst of ${size} × ${size} pairs: open it</span>`}</div>
  </div>`;
}

// Even steps of colour for even factors: what differs by a thousand times is told apart.
function shade(value, least, most) {
  const share = value <= 0 ? 0 : most > least ? Math.log(value / least) / Math.log(most / least) : 0.5;
  return `hsl(${195 - 170 * share * share} ${45 + 40 * share}% ${document.documentElement.dataset.theme !== "light" && color("dark") === "1" ? 18 + 42 * share : 92 - 44 * share}%)`;
}

function cut(label) {
  return label.length > 14 ? label.slice(0, 13) + "…" : label;
}
