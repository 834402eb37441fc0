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
