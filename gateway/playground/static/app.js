// The page: a conversation on one side, the picture of the answer that is shown on the other.

import { Picture, counted, made } from "./picture.js";
import { GatewayError, describeModel, generate } from "./stream.js";
import { Trace } from "./trace.js";

const RETRY_MILLISECONDS = 2000;
const NEAR_END = 40;
const EXAMPLES = [
  "Copy this text exactly: The gateway builds the draft tree, the target checks the draft tree, and the gateway commits the accepted path.",
  "Write a short list of five fruits, then repeat the list.",
  "Why is the sky blue?",
];
const find = (id) => document.getElementById(id);

const answers = [];
let shown = null;
let running = null;
const picture = new Picture({ onSelect: markRound, onCompare: compare });

// ---- the model

async function lookForModel() {
  try {
    const model = await describeModel(find("key").value);
    tellModel("ready", model.model);
    find("budget").placeholder = model.default_budget;
    find("budget").max = model.max_budget;
    find("max-tokens").placeholder = model.default_max_tokens;
    find("temperature").placeholder = "default";
  } catch (error) {
    if (error.reason === "UNAUTHENTICATED") {
      tellModel("bad", "needs an API key");
      find("options").open = true;
      return;
    }
    tellModel("waiting", error.reason === "OFFLINE" ? "The gateway does not answer" : "Waiting for the model");
    setTimeout(lookForModel, RETRY_MILLISECONDS);
  }
}

function tellModel(state, text) {
  find("model").dataset.state = state;
  find("model-text").textContent = text;
}

// ---- asking

function requestFor(text) {
  const system = find("system").value.trim();
  const said = answers.filter((answer) => !answer.fromFile && answer.trace.text && !answer.trace.failure);
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.flatMap(({ trace }) => [{ role: "user", content: trace.prompt }, { role: "assistant", content: trace.text }]),
    { role: "user", content: text },
  ];
  const sampling = { ...number("temperature", "temperature"), ...(find("seed").value ? { seed: find("seed").value } : {}) };
  return { chat: { messages }, sampling, ...number("budget", "budget"), ...number("max-tokens", "max_tokens") };
}

function number(id, name) {
  const { value } = find(id);
  return value === "" ? {} : { [name]: Number(value) };
}

async function send(text) {
  const answer = addAnswer(new Trace(requestFor(text), new Date().toISOString()));
  show(answer);
  await run(answer.trace, answer, (event) => {
    if (event.event === "chunk" || event.event === "round") addToText(answer, event);
  });
  finishAnswer(answer);
  if (find("compare").checked && answer.trace.finished) await compare(answer);
}

// Runs the request of a trace into the trace; what fails becomes its last event. `owner` is told whether it was stopped.
async function run(trace, owner, onEvent) {
  const asked = performance.now();
  running = new AbortController();
  showRunning("Generating");
  try {
    for await (const event of generate(trace.request, find("key").value, running.signal)) {
      trace.add(event);
      onEvent(event);
      picture.update();
    }
    if (!trace.finished && !trace.failure) throw new GatewayError("UNAVAILABLE", "The stream ended before the answer did.");
  } catch (error) {
    owner.stopped = error.name === "AbortError";
    const reason = error.reason ?? "INTERNAL";
    if (!owner.stopped) trace.add({ event: "error", at_seconds: (performance.now() - asked) / 1000, reason, message: error.message });
  }
  running = null;
  showRunning(outcome(trace, owner));
  picture.update();
}

// The same request and seed once more, without drafts: equal text, one token a round.
async function compare(answer) {
  if (running) return;
  const { request, started } = answer.trace;
  const plainRequest = { ...request, budget: 0, sampling: { ...request.sampling, seed: started.seed } };
  answer.plain = { trace: new Trace(plainRequest, new Date().toISOString()), running: true, stopped: false };
  await run(answer.plain.trace, answer.plain, () => {});
  answer.plain.running = false;
  picture.update();
}

function outcome(trace, owner) {
  if (trace.failure) return `Failed: ${trace.failure.message}`;
  return `${owner.stopped ? "Stopped" : "Done"}: ${counted(trace.numTokens, "token")} in ${counted(trace.rounds.length, "round")}`;
}

function showRunning(text) {
  const isRunning = running !== null;
  const hadFocus = [find("send"), find("stop")].includes(document.activeElement);
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
  find("status").textContent = text;
  if (hadFocus) find(isRunning ? "stop" : "message").focus();
}

// ---- the conversation

function addAnswer(trace, { fromFile = null } = {}) {
  const text = made("div", "text");
  const foot = Object.assign(made("button", "foot"), { type: "button" });
  const element = made("article", "turn", made("p", "asked", trace.prompt), text, foot);
  const answer = { trace, fromFile, element, text, foot, plain: null, stopped: false, spans: [] };
  answers.push(answer);
  element.classList.add("waiting");
  foot.textContent = "Waiting for the first token …";
  foot.addEventListener("click", () => { show(answer); showPane("rounds"); });
  text.addEventListener("click", (event) => selectSpan(answer, event.target));
  find("welcome").hidden = true;
  find("clear").hidden = false;
  find("conversation").append(element);
  scrollToEnd(true);
  return answer;
}

function addToText(answer, event) {
  if (event.event === "round") {
    const span = answer.spans.at(-1);
    span.dataset.round = answer.trace.rounds.length - 1;
    return;
  }
  const span = made("span", "", event.text);
  answer.spans.push(span);
  const follows = isAtEnd();
  answer.text.append(span);
  answer.element.classList.replace("waiting", "growing");
  answer.foot.textContent = counted(answer.trace.numTokens, "token");
  scrollToEnd(follows);
}

function finishAnswer(answer) {
  const { trace, element, foot } = answer;
  element.classList.remove("waiting", "growing");
  foot.textContent = [
    answer.fromFile ?? "",
    counted(trace.numTokens, "token"),
    counted(trace.rounds.length, "round"),
    answer.stopped ? "stopped" : "",
  ].filter(Boolean).join(" · ");
  if (trace.failure) element.insertBefore(failureNotice(answer), foot);
}

function failureNotice(answer) {
  const { trace, element } = answer;
  const again = Object.assign(made("button", "quiet", "Try again"), { type: "button" });
  again.addEventListener("click", () => {
    if (running) return;
    answers.splice(answers.indexOf(answer), 1);
    element.remove();
    send(trace.prompt);
  });
  const notice = made("div", "notice bad", made("p", "", trace.failure.message), ...(answer.fromFile ? [] : [again]));
  notice.setAttribute("role", "alert");
  return notice;
}

function show(answer) {
  shown = answer;
  for (const other of answers) other.element.classList.toggle("shown", other === answer);
  picture.show(answer);
}

function selectSpan(answer, span) {
  if (span.dataset.round === undefined) return;
  if (shown !== answer) show(answer);
  picture.select(Number(span.dataset.round));
}

// Marks the text that the selected round gave; while playing, what comes later is faint.
function markRound(answer, selected, isPlaying) {
  for (const span of answer.spans) {
    const round = span.dataset.round === undefined ? -1 : Number(span.dataset.round);
    span.classList.toggle("selected", round === selected && selected !== null);
    span.classList.toggle("later", isPlaying && round > selected);
  }
}

function isAtEnd() {
  const box = find("conversation");
  return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
}

function scrollToEnd(wanted) {
  const box = find("conversation");
  if (wanted) box.scrollTop = box.scrollHeight;
}

function clearConversation() {
  running?.abort();
  for (const answer of answers) answer.element.remove();
  answers.length = 0;
  show(null);
  find("welcome").hidden = false;
  find("clear").hidden = true;
  find("message").focus();
}

// ---- traces as files

async function openTrace(file) {
  const notice = find("trace-error");
  notice.hidden = true;
  try {
    const answer = addAnswer(Trace.fromLines(await file.text()), { fromFile: file.name });
    for (const chunk of answer.trace.chunks) {
      const span = made("span", "", chunk.text);
      if (chunk.round !== null) span.dataset.round = chunk.round;
      answer.spans.push(span);
      answer.text.append(span);
    }
    finishAnswer(answer);
    show(answer);
  } catch (error) {
    notice.textContent = `${file.name} cannot be opened. ${error.message}`;
    notice.hidden = false;
  }
  showPane("rounds");
}

function saveTrace() {
  const { trace } = shown;
  const link = made("a", "");
  link.href = URL.createObjectURL(new Blob([trace.toLines()], { type: "application/jsonl" }));
  link.download = `treewire-${trace.started?.request_id ?? "trace"}.jsonl`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// ---- the page

function showPane(name) {
  document.body.dataset.pane = name;
  for (const button of document.querySelectorAll("[data-shows]")) {
    button.setAttribute("aria-pressed", button.dataset.shows === name);
  }
}

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").setAttribute("aria-pressed", theme === "dark");
  picture.redraw();
}

function toggleTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  showTheme(theme);
  try {
    localStorage.setItem("treewire-theme", theme);
  } catch {
    // storage may be forbidden; the theme then lasts as long as the page
  }
}

function submit() {
  const message = find("message");
  const text = message.value.trim();
  if (!text || running || !find("composer").reportValidity()) return;
  message.value = "";
  send(text);
}

function wireChat() {
  find("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  find("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  find("stop").addEventListener("click", () => running?.abort());
  find("clear").addEventListener("click", clearConversation);
  find("key").addEventListener("change", lookForModel);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  for (const example of EXAMPLES) {
    const button = Object.assign(made("button", "quiet", example), { type: "button" });
    button.addEventListener("click", () => { find("message").value = example; submit(); });
    find("examples").append(button);
  }
}

function wireFiles() {
  find("open").addEventListener("click", () => find("file").click());
  find("save").addEventListener("click", saveTrace);
  find("file").addEventListener("change", ({ target }) => {
    if (target.files.length) openTrace(target.files[0]);
    target.value = "";
  });
  const drop = find("drop");
  document.addEventListener("dragenter", (event) => { if (event.dataTransfer?.types.includes("Files")) drop.hidden = false; });
  drop.addEventListener("dragleave", () => { drop.hidden = true; });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.hidden = true;
    if (event.dataTransfer.files.length) openTrace(event.dataTransfer.files[0]);
  });
}

for (const button of document.querySelectorAll("[data-shows]")) button.addEventListener("click", () => showPane(button.dataset.shows));
find("theme").addEventListener("click", toggleTheme);
wireChat();
wireFiles();
showTheme(document.documentElement.dataset.theme);
lookForModel();
