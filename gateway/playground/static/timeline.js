// All rounds on one canvas: tokens of each above, its stage times stacked below, and the selected one marked.

const STAGES = ["draft", "tree_build", "verify"];
const AXIS = 34;
const TOP = 14;
const TOKENS_HEIGHT = 84;
const BETWEEN = 22;
const TIMES_HEIGHT = 56;
const HEIGHT = TOP + TOKENS_HEIGHT + BETWEEN + TIMES_HEIGHT + 4;
const MAX_BAR = 36;
const PAGE_STEP = 10;
const TYPICAL = 0.95;
const HEADROOM = 1.5;

export class Timeline {
  #frame;
  #canvas;
  #trace = null;
  #selected = null;
  #hovered = null;
  #scheduled = false;
  #onSelect;
  #onHover;

  constructor(frame, { onSelect, onHover }) {
    this.#frame = frame;
    this.#canvas = frame.querySelector("canvas");
    this.#onSelect = onSelect;
    this.#onHover = onHover;
    new ResizeObserver(() => this.draw()).observe(frame);
    frame.addEventListener("pointermove", (event) => this.#hover(this.#roundAt(event)));
    frame.addEventListener("pointerleave", () => this.#hover(null));
    frame.addEventListener("click", (event) => this.#choose(this.#roundAt(event)));
    frame.addEventListener("keydown", (event) => this.#move(event));
  }

  show(trace, selected) {
    this.#trace = trace;
    this.#selected = selected;
    this.#tellSlider();
    this.draw();
  }

  // Draws with the next frame, once, however often it is asked to.
  draw() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      this.#paint();
    });
  }

  #tellSlider() {
    const rounds = this.#trace?.rounds ?? [];
    if (this.#selected === null || !rounds[this.#selected]) return;
    const numTokens = rounds[this.#selected].numTokens;
    this.#frame.setAttribute("aria-valuemax", rounds.length);
    this.#frame.setAttribute("aria-valuenow", this.#selected + 1);
    this.#frame.setAttribute("aria-valuetext", `round ${this.#selected + 1} of ${rounds.length}, ${numTokens} tokens`);
  }

  #hover(index) {
    if (index === this.#hovered) return;
    this.#hovered = index;
    this.#onHover(index);
    this.draw();
  }

  #choose(index) {
    if (index !== null) this.#onSelect(index);
  }

  #move(event) {
    const last = (this.#trace?.rounds.length ?? 0) - 1;
    const from = this.#selected ?? 0;
    const target = {
      ArrowLeft: from - 1, ArrowDown: from - 1, ArrowRight: from + 1, ArrowUp: from + 1,
      PageDown: from - PAGE_STEP, PageUp: from + PAGE_STEP, Home: 0, End: last,
    }[event.key];
    if (target === undefined || last < 0) return;
    event.preventDefault();
    this.#onSelect(Math.min(Math.max(target, 0), last));
  }

  #barWidth() {
    const numRounds = Math.max(this.#trace?.rounds.length ?? 0, 1);
    return Math.min((this.#frame.clientWidth - AXIS) / numRounds, MAX_BAR);
  }

  #roundAt(event) {
    const x = event.clientX - this.#canvas.getBoundingClientRect().left - AXIS;
    const index = Math.floor(x / this.#barWidth());
    return x >= 0 && index < (this.#trace?.rounds.length ?? 0) ? index : null;
  }

  #paint() {
    const width = this.#frame.clientWidth;
    if (!width || !this.#trace) return;
    const ratio = devicePixelRatio || 1;
    this.#canvas.width = width * ratio;
    this.#canvas.height = HEIGHT * ratio;
    this.#canvas.style.height = `${HEIGHT}px`;
    const pen = this.#canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const look = readLook(this.#frame);
    this.#paintMark(pen, this.#hovered, look.hover);
    this.#paintMark(pen, this.#selected, look.selected);
    this.#paintTokens(pen, width, look);
    this.#paintTimes(pen, width, look);
  }

  #paintMark(pen, index, colour) {
    if (index === null) return;
    const bar = this.#barWidth();
    pen.fillStyle = colour;
    pen.fillRect(AXIS + index * bar - 1, 4, Math.max(bar, 2) + 1, HEIGHT - 4);
  }

  #paintTokens(pen, width, look) {
    const { rounds } = this.#trace;
    const most = Math.max(4, ...rounds.map((round) => round.numTokens));
    const base = TOP + TOKENS_HEIGHT;
    const scale = TOKENS_HEIGHT / most;
    gridLine(pen, width, base, "0", look);
    gridLine(pen, width, base - most * scale, `${most}`, look);
    const bar = this.#barWidth();
    rounds.forEach((round, index) => {
      const bonus = (round.numTokens - round.numKept) * scale;
      const top = base - round.numTokens * scale;
      drawBar(pen, look.bonus, AXIS + index * bar, bar, base - bonus, bonus);
      drawBar(pen, look.accepted, AXIS + index * bar, bar, top, round.numKept * scale);
    });
    const mean = this.#trace.meanAcceptanceLength;
    if (mean !== null) meanLine(pen, width, base - mean * scale, look);
    label(pen, "tokens", 0, base - TOKENS_HEIGHT / 2, look);
  }

  #paintTimes(pen, width, look) {
    const { rounds } = this.#trace;
    const totals = rounds.map((round) => STAGES.reduce((sum, stage) => sum + (round.stage_seconds[stage] ?? 0), 0));
    const most = typicalMost(totals);
    const base = TOP + TOKENS_HEIGHT + BETWEEN + TIMES_HEIGHT;
    const ceiling = base - TIMES_HEIGHT;
    gridLine(pen, width, base, "0", look);
    gridLine(pen, width, ceiling, most ? milliseconds(most) : "", look);
    const bar = this.#barWidth();
    rounds.forEach((round, index) => {
      let top = base;
      for (const stage of STAGES) {
        const height = Math.min(((round.stage_seconds[stage] ?? 0) / (most || 1)) * TIMES_HEIGHT, top - ceiling);
        top -= height;
        drawBar(pen, look[stage], AXIS + index * bar, bar, top, height);
      }
      if (totals[index] > most) drawBar(pen, look.cut, AXIS + index * bar, bar, ceiling + 3, 2);
    });
    label(pen, "ms", 0, base - TIMES_HEIGHT / 2, look);
  }
}

// A time as people read it, with its unit.
export function duration(seconds) {
  return seconds >= 1 ? `${seconds.toPrecision(3)} s` : `${milliseconds(seconds)} ms`;
}

function milliseconds(seconds) {
  const value = seconds * 1000;
  return value >= 99.5 ? value.toFixed(0) : value.toPrecision(2);
}

// The top of the time axis: the slowest round, unless it is far slower than nearly all; then it is cut, and marked so.
function typicalMost(totals) {
  if (!totals.length) return 0;
  const sorted = [...totals].sort((one, other) => one - other);
  return Math.min(sorted.at(-1), sorted[Math.floor((sorted.length - 1) * TYPICAL)] * HEADROOM);
}

function readLook(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    accepted: colour("--accent"), bonus: colour("--bonus"), line: colour("--line"), muted: colour("--muted"),
    text: colour("--text"), cut: colour("--panel"), selected: colour("--mark"), hover: colour("--hover"),
    draft: colour("--draft"), tree_build: colour("--tree_build"), verify: colour("--verify"), font: style.fontFamily,
  };
}

function drawBar(pen, colour, x, width, y, height) {
  pen.fillStyle = colour;
  pen.fillRect(x, y, width >= 4 ? width - 1 : width, height);
}

function gridLine(pen, width, y, text, look) {
  pen.strokeStyle = look.line;
  pen.lineWidth = 1;
  pen.setLineDash([]);
  pen.beginPath();
  pen.moveTo(AXIS, Math.round(y) + 0.5);
  pen.lineTo(width, Math.round(y) + 0.5);
  pen.stroke();
  pen.textAlign = "right";
  write(pen, text, AXIS - 6, y + 4, look);
}

function meanLine(pen, width, y, look) {
  pen.strokeStyle = look.text;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  pen.moveTo(AXIS, y);
  pen.lineTo(width, y);
  pen.stroke();
  pen.setLineDash([]);
}

function label(pen, text, x, y, look) {
  pen.save();
  pen.translate(x + 9, y);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "center";
  write(pen, text, 0, 0, look);
  pen.restore();
}

function write(pen, text, x, y, look) {
  pen.fillStyle = look.muted;
  pen.font = `11px ${look.font}`;
  pen.fillText(text, x, y);
}
