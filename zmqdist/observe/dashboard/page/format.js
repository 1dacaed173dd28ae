// Texts for people: numbers with units, and texts of other processes made harmless.

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** A text of another process: bounded, and with every control and direction character visible. */
export function clean(text, most = 300) {
  const shown = String(text ?? "").slice(0, most + 1);
  const safe = shown.replace(
    /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
    (char) => {
      const hex = char.charCodeAt(0).toString(16);
      return hex.length > 2 ? `\\u${hex.padStart(4, "0")}` : `\\x${hex.padStart(2, "0")}`;
    },
  );
  return safe.length > most ? `${safe.slice(0, most - 1)}…` : safe;
}

/** The name of a function without its module. */
export function shortName(name) {
  return name.slice(name.lastIndexOf(".") + 1) || name;
}

/** A text of several lines, such as a traceback. */
export function cleanLines(text, most = 20_000) {
  return String(text ?? "")
    .slice(0, most)
    .split("\n")
    .map((line) => clean(line.replaceAll("\t", "    "), 4_096))
    .join("\n");
}

export function count(number) {
  return number == null ? "–" : whole.format(Math.round(number));
}

export function compact(number) {
  if (number == null) return "–";
  return Math.abs(number) < 1_000_000 ? whole.format(Math.round(number)) : short.format(number);
}

/** A count for a badge. */
export function brief(number) {
  return number < 10_000 ? whole.format(number) : short.format(number);
}

export function plural(number, noun, nouns = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : nouns}`;
}

export function rate(number) {
  if (number == null) return "–";
  return `${number && number < 10 ? number.toFixed(1) : compact(number)}/s`;
}

export function cores(percents) {
  return percents == null ? "–" : (percents / 100).toFixed(percents < 995 ? 1 : 0);
}

export function bytes(number) {
  if (number == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = number;
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit && size < 9.95 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export function seconds(number) {
  if (number == null) return "–";
  const value = Math.max(0, number);
  if (value === 0) return "0 s";
  if (value < 0.000_999_5) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.009_95) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.999_5) return `${Math.round(value * 1e3)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min ${Math.floor(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(number) {
  return number == null ? "–" : `${seconds(number)} ago`;
}

export function percent(fraction) {
  if (fraction == null || !Number.isFinite(fraction)) return "–";
  const value = fraction * 100;
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return value > 0 && value < 9.95 ? `${value.toFixed(1)} %` : `${Math.round(value)} %`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

/** Names in the order in which people count: worker:2 before worker:10. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;
