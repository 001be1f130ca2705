// What happened in one generation: its measures, its rounds, the selected round's tree, its times, and the plain run beside it.

import { Timeline, duration } from "./timeline.js";
import { STAGES } from "./trace.js";
import { TreeView } from "./tree.js";

const REFRESH_MILLISECONDS = 100;
const STAGE_NAMES = { prefill: "prefill", draft: "draft", tree_build: "tree build", verify: "verify" };
const find = (id) => document.getElementById(id);

export class Picture {
  #answer = null;
  #selected = null;
  #following = true;
  #refreshing = null;
  #isPlaying = false;
  #nextStep = null;
  #onSelect;
  #onCompare;
  #timeline;
  #tree;

  constructor({ onSelect, onCompare }) {
    this.#onSelect = onSelect;
    this.#onCompare = onCompare;
    this.#tree = new TreeView(find("tree"), find("tip"));
    this.#timeline = new Timeline(find("timeline"), {
      onSelect: (index) => this.select(index),
      onHover: (index) => this.#note(index ?? this.#selected),
    });
    find("previous").addEventListener("click", () => this.select(this.#selected - 1));
    find("next").addEventListener("click", () => this.select(this.#selected + 1));
    find("play").addEventListener("click", () => (this.#isPlaying ? this.#pause() : this.#play()));
  }

  // Shows an answer; null clears. A live one is followed to its newest round until another is selected.
  show(answer) {
    this.#pause();
    this.#answer = answer;
    this.#selected = answer?.trace.rounds.length ? 0 : null;
    this.#following = Boolean(answer) && !answer.fromFile;
    find("nothing").hidden = Boolean(answer);
    find("picture").hidden = !answer;
    find("save").disabled = !answer;
    this.#refresh();
  }

  // Shows what has come since, soon: at most ten times a second.
  update() {
    this.#refreshing ??= setTimeout(() => this.#refresh(), REFRESH_MILLISECONDS);
  }

  redraw() {
    this.#timeline.draw();
  }

  // Selects a round of the answer that is shown.
  select(index) {
    this.#pause();
    this.#choose(index, true);
  }

  #choose(index, animated) {
    const rounds = this.#answer.trace.rounds;
    this.#selected = Math.min(Math.max(index, 0), rounds.length - 1);
    this.#following = this.#selected === rounds.length - 1;
    this.#showRound(animated);
  }

  #refresh() {
    clearTimeout(this.#refreshing);
    this.#refreshing = null;
    if (!this.#answer) return;
    const { trace } = this.#answer;
    if (this.#following && trace.rounds.length) this.#selected = trace.rounds.length - 1;
    this.#showMeasures();
    this.#showRound(false);
    this.#showSpeed();
  }

  #showMeasures() {
    const { trace } = this.#answer;
    const drafted = trace.rounds.reduce((sum, round) => sum + round.parents.length - 1, 0);
    const kept = trace.rounds.reduce((sum, round) => sum + round.numKept, 0);
    const values = [
      ["Tokens a round", trace.meanAcceptanceLength?.toFixed(2), "acceptance length"],
      ["Tokens a second", trace.decodeSpeed?.toFixed(1), "after the first"],
      ["First token", trace.ttftSeconds === null ? null : duration(trace.ttftSeconds), "after the request"],
      ["Tokens", trace.numTokens ? `${trace.numTokens}` : null, `in ${counted(trace.rounds.length, "round")}`],
      ["Guesses kept", drafted ? `${kept}` : null, drafted ? `of ${drafted}` : "none drafted"],
    ];
    find("measures").replaceChildren(...values.map(measure));
  }

  #showRound(animated) {
    const { trace } = this.#answer;
    const { rounds } = trace;
    const round = rounds[this.#selected];
    this.#timeline.show(trace, this.#selected);
    this.#note(this.#selected);
    this.#showStages(round);
    find("position").textContent = round ? `${this.#selected + 1} of ${rounds.length}` : "–";
    find("previous").disabled = !round || this.#selected === 0;
    find("next").disabled = !round || this.#selected === rounds.length - 1;
    find("play").disabled = rounds.length < 2;
    find("tree-note").textContent = round ? roundNote(round) : waitingNote(this.#answer);
    this.#tree.show(round ?? null, { animated });
    this.#onSelect(this.#answer, this.#selected, this.#isPlaying);
  }

  #note(index) {
    const round = this.#answer?.trace.rounds[index];
    find("timeline-note").textContent = round ? `Round ${index + 1}: ${counted(round.numTokens, "token")}, ${roundTimes(round)}` : "";
  }

  #showStages(round) {
    const { trace } = this.#answer;
    const whole = trace.stageSeconds;
    const staged = sum(STAGES.map((stage) => whole[stage] ?? 0));
    const elsewhere = trace.finished ? Math.max(trace.totalSeconds - staged, 0) : 0;
    const rows = STAGES.map((stage) => stageRow(stage, round?.stage_seconds[stage], whole[stage], staged + elsewhere));
    if (trace.finished) rows.push(stageRow("elsewhere", undefined, elsewhere, staged + elsewhere));
    const table = made("table", "stage-table", made("thead", "", headings()), made("tbody", "", ...rows));
    find("stages").replaceChildren(stackedBar(whole, elsewhere), table);
  }

  #showSpeed() {
    find("speed").replaceChildren(...speedParts(this.#answer, () => this.#onCompare(this.#answer)));
  }

  #play() {
    const last = this.#answer.trace.rounds.length - 1;
    this.#isPlaying = true;
    find("play").textContent = "Pause";
    if (this.#selected >= last) this.#step(0);
    else this.#schedule();
  }

  #step(index) {
    this.#choose(index, false);
    if (index < this.#answer.trace.rounds.length - 1) this.#schedule();
    else this.#pause();
  }

  #schedule() {
    const { rounds } = this.#answer.trace;
    const next = this.#selected + 1;
    const pace = Number(find("pace").value);
    const seconds = pace ? 1 / pace : rounds[next].at_seconds - rounds[next - 1].at_seconds;
    this.#nextStep = setTimeout(() => this.#step(next), seconds * 1000);
  }

  #pause() {
    clearTimeout(this.#nextStep);
    this.#isPlaying = false;
    find("play").textContent = "Play";
    if (this.#answer) this.#onSelect(this.#answer, this.#selected, false);
  }
}

export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

export function made(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function measure([name, value, detail]) {
  return made("div", "", made("dt", "", name), made("dd", "", value ?? "–"), made("dd", "detail", detail));
}

function roundTimes(round) {
  const stages = STAGES.filter((stage) => stage in round.stage_seconds);
  return stages.map((stage) => `${STAGE_NAMES[stage]} ${duration(round.stage_seconds[stage])}`).join(", ");
}

function roundNote(round) {
  const numDrafted = round.parents.length - 1;
  if (numDrafted === 0) return "A lone root: nothing was drafted, so this round is plain decoding and gives one token.";
  const numAccepted = round.accepted_nodes.length - 1;
  const gain = `${counted(numDrafted, "token")} drafted, ${numAccepted} accepted, and the bonus: ${counted(numAccepted + 1, "token")}.`;
  return round.numTokens > numAccepted ? gain : `${gain} The answer ended after ${round.numTokens} of them.`;
}

function waitingNote(answer) {
  if (answer.trace.failure || answer.stopped) return "There was no round.";
  return answer.trace.finished ? "No round was needed: the prompt's own forward gave the only token." : "Waiting for the first round …";
}

function headings() {
  const names = ["stage", "this round", "all", "share"];
  return made("tr", "", ...names.map((name) => Object.assign(made("th", "", name), { scope: "col" })));
}

function stageRow(stage, inRound, inAll, total) {
  const name = made("th", "", made("i", `swatch ${stage}`), STAGE_NAMES[stage] ?? stage);
  name.scope = "row";
  const cells = [
    inRound === undefined ? "" : duration(inRound),
    inAll === undefined ? "" : duration(inAll),
    inAll === undefined || !total ? "" : `${Math.round((inAll / total) * 100)}%`,
  ];
  return made("tr", "", name, ...cells.map((cell) => made("td", "", cell)));
}

function stackedBar(whole, elsewhere) {
  const bar = made("div", "stacked");
  bar.setAttribute("aria-hidden", "true");
  for (const [stage, seconds] of [...STAGES.map((name) => [name, whole[name] ?? 0]), ["elsewhere", elsewhere]]) {
    const part = made("i", `swatch ${stage}`);
    part.style.flexGrow = seconds * 1e6; // microseconds: a sum below 1 would not fill the bar
    bar.append(part);
  }
  return bar;
}

function speedParts(answer, onCompare) {
  const { trace, plain } = answer;
  if (answer.fromFile) return [made("p", "note", "A trace from a file has no plain run beside it.")];
  if (plain?.trace.finished) return comparison(trace, plain.trace);
  if (plain?.running) return [made("p", "note", `Running without drafts … ${counted(plain.trace.numTokens, "token")}`)];
  if (!trace.finished) return [made("p", "note", "When the answer is complete, it can be run again without drafts.")];
  if (trace.request.budget === 0) return [made("p", "note", "This answer was decoded without drafts.")];
  const button = Object.assign(made("button", "quiet", "Run again without drafts"), { type: "button", id: "run-plain" });
  button.addEventListener("click", onCompare);
  const failure = plain?.trace.failure ? [made("p", "notice bad", plain.trace.failure.message)] : [];
  return [...failure, made("p", "note", "The same request and seed, one token a round: the text must be equal."), button];
}

function comparison(drafted, plain) {
  const isEqual = drafted.text === plain.text;
  const [withDrafts, without] = [drafted.decodeSpeed, plain.decodeSpeed];
  const most = Math.max(withDrafts ?? 0, without ?? 0);
  const parts = [speedBar("draft trees", withDrafts, most, "kept"), speedBar("plain", without, most, "faint")];
  const verdict = withDrafts && without ? `${(withDrafts / without).toFixed(2)} times the speed of plain decoding` : "Too few tokens to compare";
  parts.push(made("p", "verdict", verdict));
  parts.push(isEqual ? made("p", "note", "The text is equal, character by character.") : made("p", "notice bad", "The texts differ."));
  return parts;
}

function speedBar(name, speed, most, kind) {
  const fill = made("i", `swatch ${kind}`);
  fill.style.width = most && speed ? `${(speed / most) * 100}%` : "0";
  return made("div", "speed", made("span", "", name), made("div", "track", fill), made("span", "value", speed ? `${speed.toFixed(1)} tokens/s` : "–"));
}
