// One slider moves the maps of all backends: by hand, by key, by itself, or by a link to a step.
const players = [];

class Player {
  constructor(root) {
    this.root = root;
    const data = JSON.parse(root.querySelector(".map-data").textContent);
    const owners = data.backends.map((backend) => backend.owners).filter(Boolean);
    this.steps = [...new Set(owners.flatMap((one) => one.steps))].sort((a, b) => a - b);
    this.cards = data.backends.map((backend) => new Card(backend, this.steps, data.requests));
    const refused = new Set(owners.flatMap((one) => one.refusals ?? []).map(([step]) => step));
    this.refusals = this.steps.flatMap((step, place) => (refused.has(step) ? [place] : []));
    root.querySelector(".cards").append(...this.cards.map((card) => card.node));
    this.slider = root.querySelector(".slider");
    this.output = root.querySelector(".step");
    this.button = root.querySelector(".play");
    this.slider.max = Math.max(0, this.steps.length - 1);
    this.listen();
    this.go(0);
  }

  listen() {
    const on = (name, place) => {
      this.root.querySelector(name).addEventListener("click", () => this.jump(place()));
    };
    this.slider.addEventListener("input", () => {
      this.pause();
      this.go(Number(this.slider.value));
    });
    this.slider.addEventListener("change", () => this.link());
    this.button.addEventListener("click", () => this.toggle());
    on(".previous", () => this.place - 1);
    on(".next", () => this.place + 1);
    on(".refusal", () => this.refusals.find((place) => place > this.place) ?? this.refusals[0]);
    this.root.querySelector(".refusal").hidden = !this.refusals.length;
    for (const { node } of this.cards.filter((card) => card.owners)) {
      node.track.addEventListener("click", (event) => {
        const frame = node.track.getBoundingClientRect();
        this.jump(Math.floor(((event.clientX - frame.left) / frame.width) * this.steps.length));
      });
    }
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  /** Go to a place by hand: what plays stops, and the address bar links to the step. */
  jump(place) {
    this.pause();
    this.go(place);
    this.link();
  }

  /** Show the step at a place. */
  go(place) {
    if (!this.steps.length) return;
    this.place = Math.max(0, Math.min(place, this.steps.length - 1));
    this.slider.value = this.place;
    const step = this.steps[this.place];
    this.output.textContent = step;
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    for (const card of this.cards) card.show(step, this.place);
  }

  /** The place of the last step that is not after this one. */
  goToStep(step) {
    this.go(this.steps.findLastIndex((one) => one <= step));
  }

  link() {
    history.replaceState(null, "", `#step=${this.steps[this.place]}`);
  }

  toggle() {
    if (this.timer) return this.pause();
    if (this.place === this.steps.length - 1) this.go(0);
    const pause = Math.max(40, Math.min(20000 / this.steps.length, 500));
    this.timer = setInterval(() => {
      this.go(this.place + 1);
      if (this.place === this.steps.length - 1) this.pause();
    }, pause);
    this.button.textContent = "Pause";
    this.button.setAttribute("aria-pressed", "true");
  }

  pause() {
    if (!this.timer) return;
    clearInterval(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
    this.button.setAttribute("aria-pressed", "false");
    this.link();
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const ends = { Home: 0, End: this.steps.length - 1 };
    const places = { ArrowLeft: this.place - 1, ArrowRight: this.place + 1, ...ends };
    if (event.key === " " && event.target.tagName !== "BUTTON") this.toggle();
    else if (event.target !== this.slider && event.key in places) this.jump(places[event.key]);
    else return; // the slider knows its other keys
    event.preventDefault();
  }
}

/** `#step=3` in the address moves every map to step 3. */
function follow() {
  const match = /^#step=(\d+)$/.exec(location.hash);
  if (match) for (const player of players) player.goToStep(Number(match[1]));
}

for (const root of document.querySelectorAll(".maps")) players.push(new Player(root));
if (players.length) {
  const hidden = { width: 0, height: 0, "aria-hidden": "true", class: "hatching" };
  const size = { width: 4, height: 4, patternUnits: "userSpaceOnUse" };
  const pattern = make("pattern", { id: "hatch", ...size, patternTransform: "rotate(45)" });
  document.body.appendChild(make("svg", hidden)).append(pattern);
  pattern.append(make("path", { d: "M0 0h4" }));
  window.addEventListener("hashchange", follow);
  follow();
}
