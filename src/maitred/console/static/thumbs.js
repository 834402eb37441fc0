// A thumb up or down, drawn: not every system has a letter for it.

import { svg } from "./dom.js";

const HAND = "M7 10.5v9H3.5v-9zM7 10.5l4-7c1.6 0 2.4 1 2.2 2.4L12.6 9.5h6.1c1.2 0 2 1 1.7 2.2l-1.6 6.3c-.2.9-1 1.5-1.9 1.5H7";

/** A thumb; up for a score above the middle. It tells nothing by itself: what holds it has a label. */
export const thumb = (score) => svg("svg", {
  viewBox: "0 0 24 24", class: "hand", "aria-hidden": "true", ...(score < 0.5 ? { transform: "rotate(180)" } : {}),
}, svg("path", { d: HAND }));
