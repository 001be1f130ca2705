// One round's draft tree as SVG: columns are depths, the best child goes straight on, the others below it.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 30;
const NODE_HEIGHT = 22;
const GAP = 30;
const PADDING = 8;
const MARGIN = 4;
const MAX_CHARACTERS = 18;
const BUILD_MILLISECONDS = 500;
const MARKS = { "\n": "↵", "\t": "⇥", "\r": "␍" };

export class TreeView {
  #container;
  #tip;
  #round = null;
  #nodes = [];
  #measure = document.createElement("canvas").getContext("2d");

  constructor(container, tip) {
    this.#container = container;
    this.#tip = tip;
    container.addEventListener("keydown", (event) => this.#move(event));
    container.addEventListener("scroll", () => this.#hideTip());
  }

  // Shows the tree of a round, null for none; `animated` lets the nodes come in the order in which they were built.
  // The tree that is shown already stays as it is, with what is pointed at.
  show(round, { animated = false } = {}) {
    if (round === this.#round) return;
    this.#round = round;
    this.#hideTip();
    this.#container.replaceChildren(...(round ? [this.#drawn(round, animated)] : []));
  }

  #drawn(round, animated) {
    this.#nodes = layOut(round, (text, font) => this.#width(text, font));
    const svg = element("svg", { role: "tree", "aria-label": "Draft tree" });
    for (const node of this.#nodes) if (node.parent) svg.append(edge(node));
    for (const node of this.#nodes) svg.append(this.#group(node));
    const right = Math.max(...this.#nodes.map((node) => node.x + node.width)) + MARGIN;
    const bottom = (Math.max(...this.#nodes.map((node) => node.row)) + 1) * ROW;
    setAll(svg, { width: right, height: bottom, viewBox: `0 0 ${right} ${bottom}` });
    if (animated) letGrow(svg, this.#nodes.length);
    return svg;
  }

  #width(text, font) {
    const family = getComputedStyle(this.#container).fontFamily;
    this.#measure.font = `${font} ${family}`;
    return this.#measure.measureText(text).width;
  }

  #group(node) {
    const group = element("g", {
      class: `node ${node.kind}`, role: "treeitem", tabindex: node.parent ? -1 : 0,
      "aria-level": node.depth + 1, "aria-label": `${node.label}, ${facts(node).join(", ")}`,
      transform: `translate(${node.x} ${node.row * ROW + (ROW - NODE_HEIGHT) / 2})`,
    });
    group.dataset.order = node.order;
    group.append(element("rect", { width: node.width, height: NODE_HEIGHT, rx: 5 }));
    group.append(withText(element("text", { x: PADDING, y: 15, class: "token" }), node.label));
    if (node.percent) {
      group.append(withText(element("text", { x: node.width - PADDING, y: 15, class: "percent", "text-anchor": "end" }), node.percent));
    }
    group.addEventListener("pointerenter", () => this.#showTip(node, group));
    group.addEventListener("pointerleave", () => this.#hideTip());
    group.addEventListener("focus", () => this.#showTip(node, group));
    group.addEventListener("blur", () => this.#hideTip());
    node.group = group;
    return group;
  }

  #showTip(node, group) {
    const lines = facts(node).map((fact) => withText(document.createElement("span"), fact));
    this.#tip.replaceChildren(withText(document.createElement("strong"), node.quoted), ...lines);
    this.#tip.hidden = false;
    const frame = this.#container.parentElement.getBoundingClientRect();
    const box = group.getBoundingClientRect();
    const left = Math.min(Math.max(box.left - frame.left, 0), frame.width - this.#tip.offsetWidth);
    this.#tip.style.left = `${Math.max(left, 0)}px`;
    this.#tip.style.top = `${box.bottom - frame.top + 6}px`;
  }

  #hideTip() {
    this.#tip.hidden = true;
  }

  // Arrow keys: left to the parent, right to the first child, up and down to the row above and below.
  #move(event) {
    const current = this.#nodes.find((node) => node.group === document.activeElement);
    const target = current && neighbour(this.#nodes, current, event.key);
    if (!target) return;
    event.preventDefault();
    current.group.setAttribute("tabindex", -1);
    target.group.setAttribute("tabindex", 0);
    target.group.focus();
  }
}

// A token as people read it: spaces at its ends and line breaks are seen.
export function visible(text) {
  const marked = text.replace(/[\n\t\r]/g, (character) => MARKS[character]).replace(/^ | $/g, "·");
  const characters = [...marked];
  return characters.length > MAX_CHARACTERS ? `${characters.slice(0, MAX_CHARACTERS - 1).join("")}…` : marked || "∅";
}

function layOut(round, width) {
  const nodes = round.parents.map((parent, index) => treeNode(round, index));
  nodes.forEach((node, index) => {
    node.parent = nodes[round.parents[index]] ?? null;
    node.parent?.children.push(node);
    node.depth = node.parent ? node.parent.depth + 1 : 0;
  });
  const last = nodes[round.accepted_nodes.at(-1)];
  const bonus = { ...bonusNode(round), parent: last, depth: last.depth + 1, children: [] };
  last.children.unshift(bonus);
  placeRows(nodes[0]);
  const all = [...nodes, bonus];
  placeColumns(all, width);
  return all;
}

function treeNode(round, index) {
  const accepted = round.accepted_nodes.includes(index);
  const isRoot = index === 0;
  const probability = isRoot ? null : Math.exp(round.scores[index] - round.scores[round.parents[index]]);
  return {
    children: [], order: index, kind: isRoot ? "root accepted" : accepted ? "accepted" : "rejected",
    label: visible(round.node_texts[index]), quoted: quote(round.node_texts[index]), tokenId: round.token_ids[index],
    probability, cumulative: Math.exp(round.scores[index]), percent: isRoot ? "" : percent(probability),
  };
}

function bonusNode(round) {
  return {
    order: round.parents.length, kind: "bonus", label: visible(round.bonus_text), quoted: quote(round.bonus_text),
    tokenId: round.committed_token_ids.at(-1), percent: "",
  };
}

function facts(node) {
  const id = `token ${node.tokenId}`;
  if (node.kind === "bonus") return ["bonus: what the target says after the accepted path", id];
  if (!node.parent) return ["root: the last committed token", id];
  return [
    node.kind,
    `${percent(node.probability)} after its parent, ${percent(node.cumulative)} from the root`,
    `node ${node.order} in the order of building`,
    id,
  ];
}

function percent(probability) {
  if (probability >= 0.995) return "100%";
  return probability < 0.01 ? "<1%" : `${Math.round(probability * 100)}%`;
}

function quote(text) {
  return `“${text.replace(/[\n\t\r]/g, (character) => MARKS[character])}”`;
}

// A node and its line of first children share a row: the first one that is free in all their columns. Nodes come depth
// first, so that in every column the rows keep the order of the parents, and no two edges cross.
function placeRows(root) {
  const free = [];
  const waiting = [root];
  while (waiting.length) {
    const line = lineOf(waiting.pop());
    const row = Math.max(...line.map((node) => free[node.depth] ?? 0));
    for (const node of line) {
      node.row = row;
      free[node.depth] = row + 1;
      waiting.push(...node.children.slice(1).reverse());
    }
  }
}

function lineOf(node) {
  const line = [];
  for (let next = node; next; next = next.children[0]) line.push(next);
  return line;
}

function placeColumns(nodes, width) {
  const columns = [];
  for (const node of nodes) {
    const percentWidth = node.percent ? width(node.percent, "10.5px") + 8 : 0;
    node.width = Math.ceil(width(node.label, "13px") + percentWidth + 2 * PADDING);
    columns[node.depth] = Math.max(columns[node.depth] ?? 0, node.width);
  }
  const starts = [MARGIN];
  columns.forEach((columnWidth, depth) => { starts[depth + 1] = starts[depth] + columnWidth + GAP; });
  for (const node of nodes) node.x = starts[node.depth];
}

function edge(node) {
  const { parent } = node;
  const [fromX, fromY] = [parent.x + parent.width, (parent.row + 0.5) * ROW];
  const [toX, toY] = [node.x, (node.row + 0.5) * ROW];
  const turn = toX - GAP / 2;
  const path = fromY === toY ? `M${fromX} ${fromY}H${toX}`
    : `M${fromX} ${fromY}H${toX - GAP}C${turn} ${fromY} ${turn} ${toY} ${toX} ${toY}`;
  const kind = node.kind === "bonus" || node.kind === "accepted" ? node.kind : "rejected";
  const line = element("path", { d: path, class: `edge ${kind}` });
  line.dataset.order = node.order;
  return line;
}

function letGrow(svg, numNodes) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  svg.classList.add("growing");
  for (const part of svg.children) part.style.animationDelay = `${(part.dataset.order / numNodes) * BUILD_MILLISECONDS}ms`;
}

function neighbour(nodes, current, key) {
  if (key === "ArrowLeft") return current.parent;
  if (key === "ArrowRight") return current.children[0];
  if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
  const step = key === "ArrowUp" ? -1 : 1;
  const row = nodes.filter((node) => node.row === current.row + step);
  return row.sort((one, other) => Math.abs(one.depth - current.depth) - Math.abs(other.depth - current.depth))[0];
}

function element(name, attributes) {
  return setAll(document.createElementNS(SVG, name), attributes);
}

function setAll(target, attributes) {
  for (const [name, value] of Object.entries(attributes)) target.setAttribute(name, value);
  return target;
}

function withText(target, text) {
  target.textContent = text;
  return target;
}
