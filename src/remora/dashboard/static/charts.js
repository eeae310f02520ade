// Curves over time (uPlot), bars of a histogram, and the colours of the theme for what is drawn on a canvas.

import { html, useEffect, useLayoutEffect, useRef, useState } from "/static/htm-preact.js";
import { bytes, count, plural, rate, seconds } from "/static/format.js";

// Steps of an axis at which its marks are round numbers, as people read them, and no two are alike.
const STEPS = {
  time: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600],
  bytes: Array.from({ length: 60 }, (_, power) => 2 ** power),
  count: Array.from({ length: 39 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3)),
};
const FORMATS = { seconds, bytes, count, rate, percent: (value) => (value == null ? "–" : `${Math.round(value * 100)} %`) };

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Changes when the theme does: what is on a canvas has to be drawn anew.
export function useTheme() {
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const again = () => setTurn((before) => before + 1);
    media.addEventListener("change", again);
    addEventListener("themechange", again);
    return () => { media.removeEventListener("change", again); removeEventListener("themechange", again); };
  }, []);
  return turn;
}

// `lines`: [key, label, colour]. `data`: { time, key: values, … }. A gap in time breaks the lines.
export function Chart({ data, lines, kind = "rate", height = 170, label }) {
  const host = useRef(null), plot = useRef(null), theme = useTheme();
  const keys = lines.map(([key]) => key).join();
  useLayoutEffect(() => {
    const axis = { stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const options = {
      width: host.current.clientWidth || 300,
      height,
      padding: [8, 26, 0, 0],  // room for the half of the last time
      cursor: { y: false, points: { size: 5 } },
      legend: { live: true },
      // Durations differ by factors: the median and the slowest are both seen on a scale of powers of ten.
      scales: { y: kind === "seconds" ? { distr: 3 } : { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
      axes: [
        { ...axis, size: 26, values: (_, marks) => marks.map((mark) => new Date(mark * 1000).toLocaleTimeString("en-GB")), space: 80, incrs: STEPS.time },
        { ...axis, size: 64, values: (_, marks) => marks.map((mark) => (mark == null ? "" : FORMATS[kind](mark))), ...(STEPS[kind] && { incrs: STEPS[kind] }) },
      ],
      series: [
        { label: "Time", value: (_, value) => (value == null ? "" : new Date(value * 1000).toLocaleTimeString("en-GB")) },
        ...lines.map(([, name, shade], at) => ({
          label: name, stroke: color(shade), width: 1.6, spanGaps: false, points: { show: false },
          fill: at === 0 ? color(shade) + "1c" : undefined,
          value: (plotted, value, line, at) => FORMATS[kind](at == null ? plotted.data[line].at(-1) : value),
        })),
      ],
    };
    plot.current = new uPlot(options, arrange(data, lines), host.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: host.current.clientWidth, height }));
    observer.observe(host.current);
    return () => { observer.disconnect(); plot.current.destroy(); };
  }, [theme, keys, kind, height]);
  useEffect(() => plot.current?.setData(arrange(data, lines)), [data]);
  return html`<div class="chart" ref=${host} role="img" aria-label=${label}></div>`;
}

function arrange(data, lines) {
  const times = [], columns = lines.map(() => []);
  data.time.forEach((moment, at) => {
    if (at && moment - data.time[at - 1] > 5) { // the dashboard was not watching
      times.push(data.time[at - 1] + 0.01);
      columns.forEach((column) => column.push(null));
    }
    times.push(moment);
    lines.forEach(([key], line) => columns[line].push(data[key][at]));
  });
  return [times, ...columns];
}

// Several series with times of their own, such as one for each owner, on common times.
export function joined(series, key) {
  const times = [...new Set(series.flatMap((each) => each.time))].sort((a, b) => a - b);
  const data = { time: times };
  series.forEach((each, at) => {
    const known = new Map(each.time.map((moment, place) => [moment, each[key][place]]));
    data[`s${at}`] = times.map((moment) => known.get(moment) ?? null);
  });
  return data;
}

// Counts in buckets, each twice as wide as the one before: bucket k begins at 2**k nanoseconds.
export function Histogram({ first, counts, marks = [], label }) {
  const most = Math.max(...counts, 1), width = 100 / Math.max(counts.length, 1);
  const at = (value) => (value == null ? null : (Math.log2(value * 1e9) - first) * width);
  return html`<div class="histogram" role="img" aria-label=${label}>
    <div class="bars">${counts.map((number, place) => html`<i title=${`${seconds(2 ** (first + place) / 1e9)} to ${seconds(2 ** (first + place + 1) / 1e9)}: ${plural(number, "call")}`} style=${{ height: `${number ? Math.max((number / most) * 100, 1.5) : 0}%` }}></i>`)}
      ${marks.map(([name, value]) => at(value) != null && html`<b style=${{ left: `${Math.min(Math.max(at(value), 0), 100)}%` }}><span>${name}</span></b>`)}</div>
    <div class="axis">${counts.map((_, place) => (place % Math.ceil(counts.length / 4) === 0 ? html`<span style=${{ left: `${place * width}%` }}>${seconds(2 ** (first + place) / 1e9)}</span>` : ""))}</div>
  </div>`;
}

// How many workers have how much: in a large group, instead of a line for each.
export function Spread({ width, counts, unit, label }) {
  const most = Math.max(...counts, 1);
  return html`<div class="histogram small" role="img" aria-label=${label}>
    <div class="bars">${counts.map((number, place) => html`<i title=${`${count(place * width)} to ${count((place + 1) * width)} ${unit}: ${plural(number, "worker")}`} style=${{ height: `${number ? Math.max((number / most) * 100, 2) : 0}%` }}></i>`)}</div>
    <div class="axis"><span style=${{ left: 0 }}>0</span><span style=${{ right: 0, left: "auto" }}>${count(width * counts.length)} ${unit}</span></div>
  </div>`;
}

// A text, cut so that it takes no more room than that on a canvas.
export function fitted(context, text, room) {
  const wide = context.measureText(text).width;
  return wide <= room ? text : text.slice(0, Math.max(Math.floor((text.length * room) / wide) - 1, 0)) + "…";
}

// A canvas that fills its place at the resolution of the screen. `draw(context, width, height)` is called when `what` changes.
export function Canvas({ height, draw, what, onReady, ...rest }) {
  const host = useRef(null), theme = useTheme();
  const latest = useRef(draw);
  latest.current = draw;
  useLayoutEffect(() => {
    const canvas = host.current;
    const paint = () => {
      const scale = devicePixelRatio || 1, width = canvas.clientWidth;
      canvas.width = width * scale;
      canvas.height = height * scale;
      const context = canvas.getContext("2d");
      context.scale(scale, scale);
      latest.current(context, width, height);
    };
    paint();
    onReady?.(canvas);
    const observer = new ResizeObserver(paint);
    observer.observe(canvas);
    return () => observer.disconnect();
  }, [what, theme, height]);
  return html`<canvas ref=${host} style=${{ height: `${height}px` }} ...${rest}></canvas>`;
}
