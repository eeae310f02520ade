// Values as people read them, and addresses of things.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0) return "over";
  if (value < 1e-3) return `${round(value * 1e6)} µs`;
  if (value < 1) return `${round(value * 1e3)} ms`;
  if (value < 90) return `${round(value)} s`;
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor(value / 60) % 60} min`;
  return `${Math.floor(value / 86400)} days`;
}

export function bytes(value) {
  if (value == null) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1000 || unit === "TiB") return `${unit === "B" ? Math.round(value) : round(value)} ${unit}`;
    value /= 1024;
  }
}

export function count(value) {
  return value == null ? "–" : grouped.format(value);
}

export function rate(value) {
  if (value == null) return "–";
  return value < 10 ? round(value) : grouped.format(value);
}

export function percent(value) {
  return value == null ? "–" : `${Math.round(value * 100)} %`;
}

export function time(value) {
  return value == null ? "–" : new Date(value * 1000).toLocaleTimeString("en-GB");
}

function round(value) {
  return value >= 100 ? String(Math.round(value)) : value >= 10 ? value.toFixed(1) : value >= 1 ? value.toFixed(2) : value === 0 ? "0" : value.toPrecision(2);
}

// The address of a page, whatever characters are in the name of the thing.
export function address(page, ...parts) {
  return "/" + [page, ...parts].map(encodeURIComponent).join("/");
}

// A hue for a name, the same as long as the page is open; the first dozen are well apart.
const hues = new Map();
export function hue(name) {
  if (!hues.has(name)) hues.set(name, Math.round(205 + hues.size * 137.508) % 360);
  return hues.get(name);
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Tables as CSV. A text that a spreadsheet would take for a formula is quoted away: names come from workers.
export function csv(table) {
  const cell = (value) => {
    let text = value == null ? "" : Array.isArray(value) ? value.join(" ") : String(value);
    if (typeof value !== "number" && /^[=+\-@\t\r]/.test(text)) text = "'" + text;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const columns = table.columns.filter((column) => column.kind !== "spark");
  const lines = [columns.map((column) => cell(column.label)), ...table.rows.map((row) => columns.map((column) => cell(row[column.key])))];
  return lines.map((line) => line.join(",")).join("\r\n") + "\r\n";
}
