// The timeline: a row for each thread, a bar for each function that ran and each call that was waited for. Wheel and drag zoom and move.

import { html, useContext, useEffect, useRef, useState } from "/static/htm-preact.js";
import { address, count, hue, plural, seconds, time } from "/static/format.js";
import { Canvas, color, fitted } from "/static/charts.js";
import { go, Place } from "/static/ui.js";

const ROW = 18, HEAD = 24, RUN = 0, CALL = 1, ERROR = 2, MANY = 3;

export function Timeline({ view }) {
  const place = useContext(Place);
  const canvas = useRef(null), drag = useRef(null), timer = useRef(null);
  const [tip, setTip] = useState(null);
  // What the reader looks at; the server's bars follow a moment later and are drawn at their true place meanwhile.
  const [moved, setMoved] = useState(null);
  const shown = moved || { begin: view.begin, end: view.end };
  const left = () => namesWidth(canvas.current.clientWidth);

  useEffect(() => setMoved(null), [view.begin, view.seconds, view.end]);
  useEffect(() => () => clearTimeout(timer.current), []);

  const look = (begin, end, live = false) => {
    setMoved({ begin, end });
    clearTimeout(timer.current);
    timer.current = setTimeout(() => place.setQuery({ seconds: (end - begin).toPrecision(6), end: live ? "" : end.toFixed(6) }), 120);
  };
  const zoom = (factor, at = 1) => {
    const span = Math.min(Math.max((shown.end - shown.begin) * factor, 0.001), 600), middle = shown.begin + (shown.end - shown.begin) * at;
    look(middle - span * at, middle + span * (1 - at), view.now && at === 1);
  };
  const move = (share) => look(shown.begin + (shown.end - shown.begin) * share, shown.end + (shown.end - shown.begin) * share);
  const latest = useRef({});
  latest.current = { zoom, move, place };
  useEffect(() => {
    const press = (event) => {
      if (/^(INPUT|SELECT)$/.test(event.target.tagName)) return;
      const now = latest.current;
      const act = { "+": () => now.zoom(0.5), "=": () => now.zoom(0.5), "-": () => now.zoom(2), ArrowLeft: () => now.move(-0.25), ArrowRight: () => now.move(0.25), 0: () => now.place.setQuery({ end: "", seconds: "" }) }[event.key];
      if (act) { event.preventDefault(); act(); }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);

  const ready = (element) => {
    canvas.current = element;
    element.onwheel = (event) => { // by hand, because Preact's listeners may not prevent the page from moving
      event.preventDefault();
      const room = element.clientWidth - left();
      latest.current.zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(Math.max((event.offsetX - left()) / room, 0), 1));
    };
  };
  const find = (event) => {
    const box = canvas.current.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const row = view.rows[Math.floor((y - HEAD) / ROW)];
    if (!row || x < left()) return null;
    const room = canvas.current.clientWidth - left(), scale = room / (shown.end - shown.begin);
    const at = shown.begin + (x - left()) / scale - view.begin, near = 3 / scale;
    const bar = row.bars.findLast(([start, length]) => at >= start - near && at <= start + length + near);
    return bar ? { row, bar, x, y } : null;
  };
  const hover = (event) => {
    if (!drag.current) return setTip(find(event));
    const scale = (shown.end - shown.begin) / (canvas.current.clientWidth - left()), by = (drag.current.x - event.clientX) * scale;
    drag.current.far ||= Math.abs(drag.current.x - event.clientX) > 3;
    if (drag.current.far) look(drag.current.begin + by, drag.current.end + by);
  };
  const release = (event) => {
    const far = drag.current?.far;
    drag.current = null;
    const found = !far && find(event);
    if (found && found.bar[5] != null) go(address("calls", view.calls[found.bar[5]]));
    else if (found) go(address("functions", view.functions[found.bar[2]]));
  };
  const [start, length, name, kind, number, , , failed] = tip ? tip.bar : [];
  return html`<div class="timeline">
    <${Canvas} height=${HEAD + ROW * Math.max(view.rows.length, 1) + 6} what=${[view, shown.begin, shown.end].join()} draw=${(context, width, height) => draw(context, width, height, view, shown)} onReady=${ready}
      onMouseMove=${hover} onMouseLeave=${() => setTip(null)} onMouseDown=${(event) => (drag.current = { x: event.clientX, ...shown })} onMouseUp=${release} onDblClick=${() => place.setQuery({ end: "", seconds: "" })} role="img" aria-label="What each thread did; the pages of functions and calls say the same in tables" />
    ${tip && html`<div class="tip" style=${{ left: `${Math.min(tip.x + 14, canvas.current.clientWidth - 220)}px`, top: `${tip.y + 12}px` }}><b>${view.functions[name]}</b><br />${kind === CALL ? "waited for" : kind === ERROR ? "failed" : kind === MANY ? `and others: ${plural(number, "call")}${failed ? `, ${count(failed)} failed` : ""},` : "ran"} ${seconds(length)}<br /><span class="note">${tip.row.worker} ${tip.row.name}, ${time(view.begin + start)}</span></div>`}
  </div>`;
}

export function barColor(name) {
  return `hsl(${hue(name)} 58% ${color("dark") === "1" ? 56 : 52}%)`;
}

// White or black, whichever is read better on the bar of that function.
function ink(name) {
  const turn = hue(name) / 30, middle = color("dark") === "1" ? 0.56 : 0.52, far = 0.58 * Math.min(middle, 1 - middle);
  const part = (number) => middle - far * Math.max(-1, Math.min((number + turn) % 12 - 3, 9 - (number + turn) % 12, 1));
  const [red, green, blue] = [part(0), part(8), part(4)].map((each) => each ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.25 ? "#16181d" : "#fff";
}

function namesWidth(width) {
  return Math.min(190, width * 0.3);
}

function draw(context, width, height, view, shown) {
  const left = namesWidth(width), room = width - left, scale = room / (shown.end - shown.begin);
  const x = (moment) => left + (moment - shown.begin) * scale;
  const faint = color("faint"), line = color("line"), text = color("text"), black = color("black"), colors = view.functions.map(barColor);
  context.font = "11px system-ui";
  context.textBaseline = "middle";
  grid(context, shown, x, height, faint, line, left);
  const first = Math.min(Math.max(0, ...view.rows.map((row) => context.measureText(row.worker).width)), left * 0.45) + 10;
  let before = null;
  view.rows.forEach((row, at) => {
    const y = HEAD + at * ROW;
    if (row.worker !== before) {
      context.fillStyle = line;
      context.fillRect(0, y - 0.5, width, 1);
    }
    if (row.worker !== before) {
      context.fillStyle = text;
      context.fillText(fitted(context, row.worker, first - 8), 2, y + ROW / 2);
    }
    context.fillStyle = faint;
    context.fillText(fitted(context, row.name, left - first - 6), first, y + ROW / 2);
    before = row.worker;
    context.save();
    context.beginPath();
    context.rect(left, y, room, ROW);
    context.clip();
    for (const [start, length, name, kind, number, , busy, failed] of row.bars) {
      const begin = x(view.begin + start), wide = Math.max(length * scale, 1);
      context.fillStyle = kind === ERROR ? black : colors[name];
      context.globalAlpha = kind === CALL ? 0.3 : kind === MANY ? 0.35 + 0.65 * busy : 1;
      context.fillRect(begin, y + (kind === CALL ? 6 : 2), wide, ROW - (kind === CALL ? 12 : 4));
      context.globalAlpha = 1;
      if (kind === MANY && failed) {
        context.fillStyle = black;
        context.fillRect(begin, y + ROW - 5, wide, 3);
      }
      if (wide > 46 && kind !== CALL) {
        context.fillStyle = kind === ERROR ? color("card") : kind === MANY && busy < 0.6 ? text : ink(view.functions[name]);
        context.fillText(fitted(context, number > 1 ? `${number} calls` : view.functions[name], wide - 8), Math.max(begin, left) + 4, y + ROW / 2);
      }
    }
    context.restore();
  });
}

function grid(context, shown, x, height, faint, line, left) {
  const span = shown.end - shown.begin;
  const step = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120].find((each) => span / each < 8) || 120;
  for (let mark = Math.ceil(shown.begin / step) * step; mark < shown.end; mark += step) {
    context.fillStyle = line;
    context.fillRect(x(mark), 16, 1, height);
    context.fillStyle = faint;
    const label = step >= 1 ? time(mark) : `+${seconds(mark - Math.floor(shown.begin))}`;
    if (x(mark) > left + 4) context.fillText(label, x(mark) - (step >= 1 ? 22 : 14), 8);
  }
}
