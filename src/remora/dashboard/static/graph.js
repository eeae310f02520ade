// The wait-for graph: boxes where the server placed them, arrows between them, cycles in red.

import { html } from "/static/htm-preact.js";
import { hue, seconds } from "/static/format.js";

const WIDTH = 250, HEIGHT = 54, PAD = 14;  // as in graph_layout.py

export function Graph({ view }) {
  const places = new Map(view.boxes.map((box) => [box.id, box]));
  const width = view.width + 2 * PAD, height = view.height + 2 * PAD;
  const out = new Map(), into = new Map();
  for (const { from, to } of view.edges) {
    out.set(from, (out.get(from) || 0) + 1);
    into.set(to, (into.get(to) || 0) + 1);
  }
  return html`<div class="graph scroll"><svg viewBox=${`${-PAD} ${-PAD} ${width} ${height}`} style=${{ width: `${width}px`, minWidth: `${Math.round(width * 0.75)}px` }} role="img" aria-label="What waits for what; the table below says the same in words">
    <defs>${["edge", "bad"].map((name) => html`<marker id=${`arrow-${name}`} class=${name} viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="10" orient="auto"><path d="M0 0L8 4L0 8z" /></marker>`)}</defs>
    ${view.edges.map((edge) => html`<${Arrow} key=${`${edge.from}\n${edge.to}`} edge=${edge} from=${places.get(edge.from)} to=${places.get(edge.to)} early=${out.get(edge.from) <= into.get(edge.to)} />`)}
    ${view.boxes.map((box) => html`<${Box} key=${box.id} box=${box} />`)}
  </svg></div>`;
}

function Box({ box }) {
  const inside = html`<rect x=${box.x - WIDTH / 2} y=${box.y - HEIGHT / 2} width=${WIDTH} height=${HEIGHT} rx="8" />
    ${box.count > 1 && html`<rect class="behind" x=${box.x - WIDTH / 2 + 4} y=${box.y - HEIGHT / 2 + 4} width=${WIDTH} height=${HEIGHT} rx="8" />`}
    <rect class="side" x=${box.x - WIDTH / 2} y=${box.y - HEIGHT / 2} width="5" height=${HEIGHT} rx="2.5" style=${{ fill: `hsl(${hue(box.worker)} 60% 50%)` }} />
    <foreignObject x=${box.x - WIDTH / 2 + 14} y=${box.y - HEIGHT / 2 + 7} width=${WIDTH - 22} height=${HEIGHT - 12}><div class="title">${box.text}</div><div class="note">${box.note || box.kind}</div></foreignObject>
    <title>${`${box.text}\n${box.note}`}</title>`;
  const kind = `box ${box.bad ? "bad" : ""} ${box.gone ? "gone" : ""}`;
  return box.href ? html`<a class=${kind} href=${box.href} aria-label=${box.text}>${inside}</a>` : html`<g class=${kind}>${inside}</g>`;
}

// `early`: its age stands near its beginning, where many arrows lead to one box; else near its end.
function Arrow({ edge, from, to, early }) {
  const forwards = to.x - from.x > WIDTH + 60; // the next column, not the next of a ring
  const [x1, y1] = forwards ? [from.x + WIDTH / 2, from.y] : border(from, to);
  const [x2, y2] = forwards ? [to.x - WIDTH / 2 - 2, to.y] : border(to, from);
  const half = (x2 - x1) / 2;
  // Backwards or within a ring it is bent a little to the left: two that lead back and forth stay apart.
  const bend = edge.bad ? 0.14 : 0.06;
  const [cx, cy] = [(x1 + x2) / 2 - (y1 - y2) * bend, (y1 + y2) / 2 + (x1 - x2) * bend];
  const path = forwards ? `M${x1} ${y1}C${x1 + half} ${y1} ${x2 - half} ${y2} ${x2} ${y2}` : `M${x1} ${y1}Q${cx} ${cy} ${x2} ${y2}`;
  const [mx, my] = forwards ? [early ? x1 + 0.6 * half : x2 - 0.6 * half, early ? y1 + 0.16 * (y2 - y1) : y2 - 0.16 * (y2 - y1)] : [(x1 + 2 * cx + x2) / 4, (y1 + 2 * cy + y2) / 4];
  return html`<g class="arrow ${edge.bad ? "bad" : ""}"><path d=${path} marker-end=${`url(#arrow-${edge.bad ? "bad" : "edge"})`} />
    ${edge.age != null && html`<text x=${mx} y=${my - 4} text-anchor="middle">${seconds(edge.age)}</text>`}<title>${edge.text}</title></g>`;
}

// Where the line between the middles of two boxes leaves the first one.
function border(from, to) {
  const dx = to.x - from.x, dy = to.y - from.y;
  const scale = 1 / Math.max(Math.abs(dx) / (WIDTH / 2 + 3), Math.abs(dy) / (HEIGHT / 2 + 3), 1e-9);
  return [Math.round(from.x + dx * scale), Math.round(from.y + dy * scale)];
}
