// Numbers and times as people read them.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/** 12,345 as 12.3K; small numbers whole. */
export const count = (value) => (Math.abs(value) < 10_000 ? plain.format(value) : compact.format(value));

/** Seconds as 50 µs, 12 ms, 1.2 s, 3 min; a dash for null. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.000095) return `${plain.format(seconds * 1e6)} µs`;
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${count(Math.round(seconds / 86_400))} d`;
}

/** The time of day of seconds since the epoch. */
export const time = (seconds) => clock.format(new Date(seconds * 1000));

/** Date and time of an ISO 8601 text. */
export const date = (iso) => (iso ? day.format(new Date(iso)) : "–");

export const percent = (share) => `${Math.round(share * 100)} %`;

export const usd = (value) => `$${value < 0.01 && value > 0 ? value.toPrecision(2) : value.toFixed(2)}`;

/** `tokens_per_minute` as "tokens per minute". */
export const words = (name) => name.replaceAll("_", " ").replace(/^usd/, "USD").replace(/^./, (first) => first.toUpperCase());

/** A limit's amount in its unit. */
export const amount = (kind, value) => (kind.startsWith("usd_") ? usd(value) : count(value));

/** Bytes as 1.2 GiB; a dash for null. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let left = value;
  while (left >= 1024 && unit < units.length - 1) { left /= 1024; unit += 1; }
  return `${left.toFixed(left >= 100 || unit === 0 ? 0 : 1)} ${units[unit]}`;
}

/** Milliseconds as `span` writes seconds. */
export const milliseconds = (value) => span(value === null || value === undefined ? null : value / 1000);

/** A name as a part of a path or a query. */
export const quoted = encodeURIComponent;
