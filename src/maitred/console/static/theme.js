// Dark or light: as the system says, or as one chose here. Charts are told, because a canvas inherits no colours.

const STORED = "maitred-theme";
const CHOICES = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };
const listeners = new Set();

const chosen = () => {
  try { return localStorage.getItem(STORED) in CHOICES ? localStorage.getItem(STORED) : "auto"; } catch { return "auto"; }
};

function apply(button) {
  const choice = chosen();
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  button.textContent = CHOICES[choice];
  button.title = "Light or dark: as the system says (Auto), or always";
  for (const listener of listeners) listener();
}

/** Makes `button` the switch. */
export function themeSwitch(button) {
  button.addEventListener("click", () => {
    const names = Object.keys(CHOICES);
    const next = names[(names.indexOf(chosen()) + 1) % names.length];
    try { localStorage.setItem(STORED, next); } catch { /* private windows: it lasts as long as the page */ }
    apply(button);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(button));
  apply(button);
}

/** Calls `listener` when colours change; returns what ends that. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** A colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
