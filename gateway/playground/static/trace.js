// A generation as it was told, event by event: what docs/trace.md describes, read, kept and written.

export const STAGES = ["prefill", "draft", "tree_build", "verify"];
const VERSION = 1;

export class TraceError extends Error {}

export class Trace {
  constructor(request, recordedAt) {
    this.request = request;
    this.recordedAt = recordedAt;
    this.events = [];
    this.started = null;
    this.chunks = [];
    this.rounds = [];
    this.finished = null;
    this.failure = null;
  }

  // Takes the next event. A round belongs to the chunk before it: its text, and the tokens of it that count (`numTokens`, of
  // which `numKept` were drafted), since the answer may end within a round.
  add(event) {
    this.events.push(event);
    if (event.event === "started") this.started = event;
    else if (event.event === "chunk") this.chunks.push({ ...event, round: null });
    else if (event.event === "round") this.#addRound(event);
    else if (event.event === "finished") this.finished = event;
    else if (event.event === "error") this.failure = event;
  }

  #addRound(event) {
    checkTree(event);
    const chunk = this.chunks.at(-1);
    if (chunk) chunk.round = this.rounds.length;
    const numTokens = chunk ? chunk.token_ids.length : event.committed_token_ids.length;
    this.rounds.push({ ...event, numTokens, numKept: Math.min(numTokens, event.accepted_nodes.length - 1) });
  }

  get text() {
    return this.chunks.map((chunk) => chunk.text).join("");
  }

  get numTokens() {
    return this.chunks.reduce((sum, chunk) => sum + chunk.token_ids.length, 0);
  }

  get meanAcceptanceLength() {
    const { rounds } = this;
    return rounds.length ? rounds.reduce((sum, round) => sum + round.numTokens, 0) / rounds.length : null;
  }

  // Seconds from the request to the first token; null before it.
  get ttftSeconds() {
    return this.finished?.statistics.ttft_seconds ?? this.chunks[0]?.at_seconds ?? null;
  }

  get totalSeconds() {
    return this.finished?.statistics.total_seconds ?? this.events.at(-1)?.at_seconds ?? 0;
  }

  // Tokens a second after the first token: the prompt's time is left out. Null until there are two.
  get decodeSpeed() {
    const seconds = this.totalSeconds - (this.ttftSeconds ?? 0);
    return this.numTokens > 1 && seconds > 0 ? (this.numTokens - 1) / seconds : null;
  }

  // Seconds by stage, of the whole generation once it has finished, of the rounds so far before.
  get stageSeconds() {
    if (this.finished) return this.finished.statistics.stage_seconds;
    const sums = {};
    for (const round of this.rounds) {
      for (const [stage, seconds] of Object.entries(round.stage_seconds)) sums[stage] = (sums[stage] ?? 0) + seconds;
    }
    return sums;
  }

  get prompt() {
    const messages = this.request.chat?.messages;
    return messages?.length ? messages.at(-1).content : this.request.text ?? "";
  }

  toLines() {
    const header = { event: "trace", version: VERSION, recorded_at: this.recordedAt, request: this.request };
    return [header, ...this.events].map((line) => `${JSON.stringify(line)}\n`).join("");
  }

  // Reads a file's text. TraceError, with the number of the line, if it is no trace.
  static fromLines(text) {
    let trace = null;
    text.trimEnd().split("\n").forEach((line, index) => {
      try {
        const values = JSON.parse(line);
        if (trace) trace.add(checkEvent(values));
        else trace = new Trace(...checkHeader(values));
      } catch (error) {
        throw new TraceError(`Line ${index + 1} is no line of a trace: ${error.message}`);
      }
    });
    return trace;
  }
}

function checkHeader(values) {
  if (values?.event !== "trace") throw new TraceError("the first line is the header");
  if (values.version !== VERSION) throw new TraceError(`version is ${values.version}, this page knows ${VERSION}`);
  if (typeof values.request !== "object" || values.request === null) throw new TraceError("request is missing");
  return [values.request, String(values.recorded_at)];
}

const FIELDS = {
  started: { model: "string", request_id: "string" },
  chunk: { text: "string", token_ids: "object" },
  round: { token_ids: "object", parents: "object", scores: "object", accepted_nodes: "object", node_texts: "object",
    committed_token_ids: "object", stage_seconds: "object", bonus_text: "string" },
  finished: { finish_reason: "string", statistics: "object" },
  error: { reason: "string", message: "string" },
};

function checkEvent(values) {
  const fields = FIELDS[values?.event];
  if (!fields) throw new TraceError(`event is ${JSON.stringify(values?.event)}`);
  if (typeof values.at_seconds !== "number") throw new TraceError("at_seconds is no number");
  for (const [name, type] of Object.entries(fields)) {
    if (typeof values[name] !== type || values[name] === null) throw new TraceError(`${name} is no ${type}`);
  }
  return values;
}

function checkTree({ parents, scores, node_texts: texts, accepted_nodes: accepted }) {
  const sizes = new Set([parents.length, scores.length, texts.length]);
  const inOrder = parents.every((parent, node) => (node === 0 ? parent === -1 : parent >= 0 && parent < node));
  if (sizes.size !== 1 || parents.length === 0 || !inOrder) throw new TraceError("the round has no tree");
  const isPath = accepted.every((node, index) => (index === 0 ? node === 0 : parents[node] === accepted[index - 1]));
  if (accepted.length === 0 || !isPath) throw new TraceError("accepted_nodes are no path from the root");
}
