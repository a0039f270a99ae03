// The address-space map: per backend all slots at one step, row below row, as their owners' shapes.
const WIDTH = 320, GUTTER = 30, HEAD = 5, MOST_HEIGHT = 250;
const NUMBERS = [
  ["live", "live"], ["reserved", "reserved"], ["waste", "waste"],
  ["free", "free"], ["largest_free", "largest run"], ["waiting", "waiting"],
];
const format = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });
const tip = document.body.appendChild(make("div", { id: "tip", role: "tooltip", hidden: "" }));

function make(name, attributes = {}, text) {
  const isSvg = ["svg", "path", "rect", "text", "line", "defs", "pattern"].includes(name);
  const node = isSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text; // never markup: names come from files
  return node;
}

/** Slots as people read them: both ends belong to the interval. */
function slots(low, high) {
  const whole = Number.isInteger(low) && Number.isInteger(high);
  if (!whole) return `slots ${format.format(low)} to ${format.format(high)}`;
  return high - low === 1 ? `slot ${low}` : `slots ${low}–${high - 1}`;
}

/** Runs of a step by address; neighbours of one owner are one run where its tokens go on. */
function joined(row) {
  const runs = [];
  for (const [low, high, request, stored = high - low] of [...row].sort((a, b) => a[0] - b[0])) {
    const last = runs.at(-1);
    const goesOn = last && last.request === request && last.high === low;
    if (goesOn && last.stored === last.high - last.low) {
      last.high = high;
      last.stored += stored;
    } else runs.push({ low, high, request, stored });
  }
  return runs;
}

/** How many slots stand in a row, and how large one is. */
function grid(count) {
  const columns = 2 ** Math.ceil(Math.log2(Math.max(Math.sqrt(count), 8)));
  const rows = Math.ceil(count / columns);
  const width = (WIDTH - GUTTER) / columns;
  return { columns, rows, width, height: Math.min(width, MOST_HEIGHT / rows) };
}

/** Rectangles [x, y, width, height] of the slots from low to high; whole rows are one. */
function boxes({ columns, width, height }, low, high) {
  const found = [];
  while (low < high) {
    const line = Math.floor(low / columns), left = low - line * columns;
    const lines = left === 0 ? Math.max(1, Math.floor((high - low) / columns)) : 1;
    const end = Math.min(high, (line + lines) * columns);
    const across = lines > 1 ? columns : end - low;
    found.push([GUTTER + left * width, line * height, across * width, lines * height]);
    low = end;
  }
  return found;
}

const outline = (found) => found.map(([x, y, w, h]) => `M${x} ${y}h${w}v${h}h${-w}z`).join("");

class Card {
  constructor(backend, steps, colors) {
    this.backend = backend;
    this.owners = backend.owners;
    this.colors = colors;
    this.node = make("article", { class: "card", style: `--color:${backend.color}` });
    this.state = make("span", { class: "state" });
    const title = this.node.appendChild(make("h4", {}, backend.spec));
    title.append(this.state);
    if (!this.owners) {
      this.state.textContent = "too large: its owners were not recorded";
      return;
    }
    this.at = new Map(this.owners.steps.map((step, place) => [step, place]));
    this.grid = grid(this.owners.slots);
    const height = this.grid.rows * this.grid.height;
    this.map = make("svg", { class: "map", viewBox: `0 ${-HEAD} ${WIDTH + 1} ${height + HEAD + 1}` });
    this.node.append(this.map, this.track(steps));
    const list = this.node.appendChild(make("dl", { class: "numbers" }));
    this.numbers = {};
    for (const [name, label] of NUMBERS) {
      const pair = list.appendChild(make("div"));
      pair.append(make("dt", {}, label));
      this.numbers[name] = pair.appendChild(make("dd", { "data-number": name }));
    }
    this.refused = this.node.appendChild(make("ul", { class: "refused", "aria-live": "polite" }));
    this.map.addEventListener("pointermove", (event) => this.point(event));
    this.map.addEventListener("pointerdown", (event) => this.point(event));
    this.map.addEventListener("pointerleave", () => this.leave());
  }

  /** Reserved and live over all steps, refusals as ticks: where there is something to see. */
  track(steps) {
    const { numbers, slots: most, refusals = [] } = this.owners;
    const box = `0 0 ${steps.length} 34`;
    const track = make("svg", { class: "track", viewBox: box, preserveAspectRatio: "none" });
    for (const name of numbers ? ["reserved", "live"] : []) {
      const line = steps.map((step) => {
        const place = this.at.get(step);
        return `V${34 - 28 * (place === undefined ? 0 : numbers[name][place]) / most}h1`;
      });
      track.append(make("path", { class: name, d: `M0 34${line.join("")}V34z` }));
    }
    const places = new Map(steps.map((step, place) => [step, place]));
    const ticks = [...new Set(refusals.map(([step]) => places.get(step)))];
    track.append(make("path", { class: "refusals", d: ticks.map((x) => `M${x + 0.5} 0v5`).join("") }));
    this.now = track.appendChild(make("line", { class: "now", y1: 0, y2: 34 }));
    this.node.track = track;
    return track;
  }

  show(step, place) {
    if (!this.owners) return;
    const mine = this.at.get(step);
    const last = this.owners.steps.at(-1);
    const row = mine === undefined ? [] : this.owners.rows[mine];
    this.runs = joined(row);
    this.state.textContent =
      mine !== undefined ? "" : step > last ? `done at step ${last}` : "idle: nothing runs or waits";
    const numbers = {};
    for (const [name, values] of Object.entries(this.owners.numbers ?? {})) numbers[name] = values[mine];
    numbers.waste = numbers.reserved - numbers.live;
    for (const [name] of NUMBERS) {
      const value = numbers[name];
      this.numbers[name].textContent = Number.isFinite(value) ? format.format(value) : "–";
    }
    const refusals = (this.owners.refusals ?? []).filter(([when]) => when === step);
    this.refused.replaceChildren(...refusals.map(([, request, ...told]) => {
      const [needed, free, largest] = told.map((value) => format.format(value));
      const why = told.length ? `: needs ${needed}, ${free} free, largest run ${largest}` : "";
      return make("li", {}, `✕ request ${request + 1} refused${why}`);
    }));
    for (const end of ["x1", "x2"]) this.now.setAttribute(end, place + 0.5);
    this.draw();
    if (this.pointer) this.point(this.pointer);
  }

  draw() {
    const { columns, rows, width, height } = this.grid;
    const ground = boxes(this.grid, 0, this.owners.slots);
    const nodes = [make("path", { class: "ground", d: outline(ground) })];
    if (Math.min(width, height) >= 8) {
      const cells = [];
      for (let slot = 0; slot < this.owners.slots; slot++) cells.push(...boxes(this.grid, slot, slot + 1));
      nodes.push(make("path", { class: "grid", d: outline(cells) }));
    }
    const every = Math.ceil(rows / 8);
    for (let line = 0; line < rows; line += every) {
      const place = { class: "address", x: GUTTER - 5, y: (line + 0.5) * height };
      nodes.push(make("text", place, line * columns));
    }
    const labels = [];
    for (const run of this.runs) nodes.push(...this.shapes(run, labels));
    this.pointed = make("path", { class: "pointed" });
    this.map.replaceChildren(...nodes, ...labels, this.pointed);
  }

  /** Stored and empty part of a run; its number where there is room for it. */
  shapes({ low, high, request, stored }, labels) {
    const shapes = [];
    const color = `--request:${this.colors[request % this.colors.length]}`;
    const border = Math.min(1, this.grid.height / 6);
    const parts = [["stored", low, low + stored], ["empty", low + stored, high]];
    for (const [kind, from, to] of parts.filter(([, from, to]) => from < to)) {
      const d = outline(boxes(this.grid, from, to));
      const told = `request ${request + 1}, ${slots(from, to)}, ${kind}`;
      const look = { class: `run ${kind}`, d, style: color, "stroke-width": border };
      shapes.push(make("path", { ...look, role: "img", "aria-label": told }));
      if (kind === "empty") shapes.push(make("path", { class: "hatch", d }));
    }
    const widest = boxes(this.grid, low, high).reduce((a, b) => (b[2] > a[2] ? b : a));
    const [x, y, w, h] = widest, text = String(request + 1);
    if (w >= 6 + 6 * text.length && h >= 9) labels.push(make("text", { x: x + w / 2, y: y + h / 2 }, text));
    return shapes;
  }

  /** Tell who owns the slot under the pointer; several may share it. */
  point(event) {
    this.pointer = { clientX: event.clientX, clientY: event.clientY };
    const frame = this.map.getBoundingClientRect();
    const scale = (WIDTH + 1) / frame.width;
    const { columns, rows, width, height } = this.grid;
    const column = Math.floor(((event.clientX - frame.left) * scale - GUTTER) / width);
    const line = Math.floor(((event.clientY - frame.top) * scale - HEAD) / height);
    const slot = line * columns + column;
    const inside = column >= 0 && column < columns && line >= 0 && line < rows;
    if (!inside || slot >= this.owners.slots) return this.leave();
    const here = this.runs.filter(({ low, high }) => low < slot + 1 && high > slot);
    const [low, high] = here.length ? [here[0].low, here[0].high] : this.gap(slot);
    const told = here.map((run) => {
      const empty = run.high - run.low - run.stored;
      const rest = empty ? `, ${format.format(empty)} reserved without one` : "";
      const stored = `${format.format(run.stored)} with a token${rest}`;
      return `request ${run.request + 1}: ${slots(run.low, run.high)}, ${stored}`;
    });
    tip.textContent = told.join("; ") || `free: ${slots(low, high)}`;
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
    this.pointed.setAttribute("d", outline(boxes(this.grid, low, high)));
  }

  gap(slot) {
    const before = this.runs.filter(({ high }) => high <= slot).map(({ high }) => high);
    const after = this.runs.filter(({ low }) => low > slot).map(({ low }) => low);
    return [Math.max(0, ...before), Math.min(this.owners.slots, ...after)];
  }

  leave() {
    this.pointer = null;
    tip.hidden = true;
    this.pointed?.setAttribute("d", "");
  }
}
