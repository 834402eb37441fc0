// The playground: a conversation with one model, or the same with two side by side, and what each answer took.

import { attempt, el, field } from "./dom.js";
import { count, span } from "./format.js";
import { events, get, Refusal, request, send } from "./server.js";
import { thumb } from "./thumbs.js";

const TOLD = { "x-maitred-model": "model", "x-maitred-degraded": "degraded", "x-maitred-fallback": "fallback", "x-maitred-escalated": "escalated", "x-maitred-rollout": "rollout", "x-maitred-max-tokens-clamped": "max_tokens lowered to" };

/** One model's side: its turns of the conversation, and the answer that is coming. */
class Side {
  constructor(name) {
    this.name = name;
    this.turns = [];
    this.model = el("select", { "aria-label": `Model ${name}` });
    this.log = el("div", { class: "turns", role: "log", "aria-label": `Conversation ${name}`, tabindex: 0 });
    this.node = el("section", { class: "side", "aria-label": `Side ${name}` }, el("div", { class: "head" }, this.model), this.log);
    this.clear();
  }

  clear() {
    this.turns = [];
    this.log.replaceChildren(el("p", { class: "empty" }, "Ask something. The answer streams in, with its tokens and times."));
  }

  /** Sends what was asked and shows the answer as it comes. */
  async ask(text, options, signal) {
    if (!this.turns.length) this.log.replaceChildren();
    this.turns.push({ role: "user", content: text });
    const answer = el("div", { class: "text" });
    const thought = el("details", { hidden: true }, el("summary", {}, "Thoughts"), el("div", { class: "text" }));
    const facts = el("p", { class: "facts hint" }, "Waiting…");
    this.log.append(el("div", { class: "turn user" }, text), el("div", { class: "turn model", "aria-busy": "true" }, thought, answer, facts));
    const bubble = this.log.lastElementChild;
    this.follow();
    const { system, ...parameters } = options;
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.turns];
    const began = performance.now();
    const seen = { first: null, last: null, usage: null, finish: null, headers: [] };
    let written = "";
    try {
      const response = await request("POST", "/v1/chat/completions", {
        signal, headers: { "x-maitred-explain": "true" },
        body: { model: this.model.value, messages, stream: true, stream_options: { include_usage: true }, ...parameters },
      });
      seen.headers = Object.entries(TOLD).filter(([name]) => response.headers.get(name)).map(([name, label]) => `${label} ${response.headers.get(name)}`);
      seen.id = response.headers.get("x-request-id");
      seen.waited = response.headers.get("x-maitred-waited");
      for await (const event of events(response)) {
        if (event.data === "[DONE]") { seen.whole = true; break; }
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Refusal(response.status, chunk.error);
        if (chunk.usage) seen.usage = chunk.usage;
        const [choice] = chunk.choices;
        if (!choice) continue;
        const { content, reasoning_content: reasoning } = choice.delta;
        if (content || reasoning) {
          seen.first ??= performance.now() - began;
          seen.last = performance.now() - began;
        }
        if (reasoning) { thought.hidden = false; thought.lastElementChild.append(reasoning); }
        if (content) { written += content; answer.append(content); this.follow(); }
        if (choice.finish_reason) seen.finish = choice.finish_reason;
      }
      if (!seen.whole) throw new Error("The answer was cut: the connection ended before the server had finished.");
    } catch (error) {
      const stopped = signal.aborted;
      bubble.append(el("p", { class: stopped ? "hint" : "fault", role: stopped ? null : "alert" },
        stopped ? "Stopped." : [error.message, error.code && el("code", {}, error.code), error.retryAfter && ` Come back in ${error.retryAfter} s.`]));
    }
    if (written) this.turns.push({ role: "assistant", content: written });
    else this.turns.pop();
    bubble.removeAttribute("aria-busy");
    facts.replaceChildren(...told(seen, performance.now() - began));
    if (seen.whole && seen.id) bubble.append(opinion(seen.id));
    this.follow();
  }

  follow() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function told(seen, took) {
  const facts = [];
  const say = (name, value) => facts.push(el("span", {}, `${name} `, el("b", {}, value)));
  if (seen.first !== null) say("first token", span(seen.first / 1000));
  say("in all", span(took / 1000));
  if (seen.usage) {
    const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = seen.usage;
    say("prompt", `${count(prompt)} tokens${details?.cached_tokens ? `, ${count(details.cached_tokens)} cached` : ""}`);
    say("answer", `${count(output)} tokens`);
    if (output > 1 && seen.last > seen.first) say("pace", `${count((output - 1) / ((seen.last - seen.first) / 1000))} tokens/s`);
  }
  if (seen.waited) say("waited", seen.waited.split(", ").map((part) => part.replace("=", " ")).join(", ").concat(" ms"));
  if (seen.finish) say("ended by", seen.finish);
  for (const each of seen.headers) facts.push(el("span", {}, each));
  return facts;
}

/** Thumbs for an answer, and, once one of them is chosen, a place for words. The last thing said holds. */
function opinion(id) {
  const said = el("span", { class: "hint", role: "status" });
  const fault = el("span", { class: "fault", role: "alert" });
  const words = el("input", { maxlength: 4000, autocomplete: "off", "aria-label": "What about it?", placeholder: "What about it?" });
  const more = el("form", { class: "opinion", hidden: true }, words, el("button", { class: "quiet" }, "Say so"));
  let score = null;
  const tell = (text) => attempt(fault, async () => {
    await send("POST", "/v1/feedback", { request_id: id, score, text: words.value.trim() });
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(score === 1 - place)));
    more.hidden = false;
    said.textContent = text;
  });
  const buttons = [1, 0].map((value) => el("button", {
    type: "button", class: "quiet thumb", "aria-pressed": "false", "aria-label": value ? "Good answer" : "Bad answer", title: value ? "Good answer" : "Bad answer",
    onclick: () => { score = value; return tell("Thank you."); },
  }, thumb(value)));
  more.addEventListener("submit", (event) => { event.preventDefault(); tell("Noted."); });
  return el("div", { class: "thumbs" }, buttons, said, fault, more);
}

export function playgroundPage() {
  const sides = [new Side("A"), new Side("B")];
  const number = (value, min, max, step) => el("input", { type: "number", min, max, step, value, inputmode: "decimal" });
  const temperature = number("", 0, 2, "any");
  const topP = number("", 0, 1, "any");
  const maxTokens = number("256", 1, 1_000_000, 1);
  const seed = number("", 0, 2 ** 53, 1);
  const system = el("textarea", { rows: 2 });
  const compare = el("input", { type: "checkbox", id: "compare" });
  const text = el("textarea", { rows: 3, required: true, placeholder: "Ask something", "aria-label": "Your message", enterkeyhint: "send" });
  const sendButton = el("button", { class: "strong" }, "Send");
  const stopButton = el("button", { type: "button", class: "quiet", disabled: true }, "Stop");
  const clearButton = el("button", { type: "button", class: "quiet" }, "Clear");
  const fault = el("p", { class: "fault", role: "alert" });
  let running = null;

  const form = el("form", { class: "composer" }, text,
    el("div", { class: "actions" }, el("span", { class: "hint" }, "Enter sends, Shift+Enter begins a line."), clearButton, stopButton, sendButton));
  const node = el("div", { class: "playground" },
    el("aside", { class: "panel parameters", "aria-label": "Parameters" },
      el("h2", {}, "Parameters"),
      el("div", { class: "check" }, compare, el("label", { for: "compare" }, "Compare two models")),
      el("div", { class: "pair" }, field("Temperature", temperature, "0 to 2"), field("Top p", topP, "0 to 1")),
      el("div", { class: "pair" }, field("Max tokens", maxTokens), field("Seed", seed)),
      field("System prompt", system),
      el("p", { class: "hint" }, "What is empty is as the model has it.")),
    el("div", { class: "talk" }, fault, el("div", { class: "sides" }, sides.map((side) => side.node)), form));

  const layout = () => { sides[1].node.hidden = !compare.checked; node.classList.toggle("two", compare.checked); };
  compare.addEventListener("change", layout);
  layout();

  const parameters = () => {
    const values = { temperature: temperature.value, top_p: topP.value, max_tokens: maxTokens.value, seed: seed.value };
    const given = Object.entries(values).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]);
    return { ...Object.fromEntries(given), system: system.value.trim() };
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = text.value.trim();
    if (!asked || running) return;
    running = new AbortController();
    sendButton.disabled = true;
    stopButton.disabled = false;
    text.value = "";
    await Promise.all(sides.slice(0, compare.checked ? 2 : 1).map((side) => side.ask(asked, parameters(), running.signal)));
    running = null;
    sendButton.disabled = false;
    stopButton.disabled = true;
    text.focus();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  stopButton.addEventListener("click", () => running?.abort());
  clearButton.addEventListener("click", () => { running?.abort(); for (const side of sides) side.clear(); text.focus(); });

  async function enter() {
    try {
      // Encoders give vectors, and no answers.
      const models = (await get("/v1/models")).data.filter((model) => !model.embedding_dimensions).map((model) => model.id);
      sides.forEach((side, place) => {
        side.model.replaceChildren(...models.map((name) => el("option", { value: name }, name)));
        side.model.value = models[Math.min(place, models.length - 1)] ?? "";
      });
      sendButton.disabled = !models.length;
      if (!models.length) fault.textContent = "No model is served to this key yet.";
      text.focus();
    } catch (error) {
      fault.textContent = error.message;
    }
  }

  return { node, enter, leave: () => running?.abort() };
}
