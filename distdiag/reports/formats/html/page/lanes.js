// Lanes of time: one row for each rank, drawn on a canvas that stays in view while the rows scroll.
const [STEP, CALL, WAIT, PHASE, MOMENT] = [0, 1, 2, 3, 4];
const AXIS = 22;

function duration(us) {
  const size = Math.abs(us);
  if (size >= 6e7) return `${(us / 6e7).toFixed(1)} min`;
  if (size >= 1e6) return `${(us / 1e6).toFixed(size < 1e7 ? 2 : 1)} s`;
  if (size >= 1e3) return `${(us / 1e3).toFixed(1)} ms`;
  return `${Math.round(us)} µs`;
}

function niceStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

class Lanes {
  constructor(data, place) {
    this.data = data;
    // A run begins with seconds of imports, in which there is nothing to see.
    const starts = data.lanes.flatMap((lane) => lane.bars.filter((bar) => bar[0] !== MOMENT && bar[0] !== PHASE).map((bar) => bar[1]));
    const first = starts.reduce((a, b) => Math.min(a, b), data.length);
    this.from = Math.max(0, first - 0.02 * (data.length - first));
    this.to = data.length;
    this.row = data.lanes.length <= 32 ? 24 : data.lanes.length <= 128 ? 16 : 11;
    this.tip = make("div", { class: "tip", role: "status", "aria-live": "polite" });
    this.canvas = make("canvas", { tabIndex: 0, role: "img" });
    this.canvas.setAttribute("aria-label", `Time of ${data.lanes.length} ranks over ${duration(data.length)}`);
    const height = AXIS + this.row * data.lanes.length + 4;
    this.filler = make("div");
    this.box = make("div", { class: "lanes" }, this.canvas, this.filler);
    const tools = make("div", { class: "lane-tools" });
    for (const [label, name, act] of [
      ["+", "Zoom in", () => this.zoom(0.5)], ["−", "Zoom out", () => this.zoom(2)],
      ["←", "Earlier", () => this.move(-0.25)], ["→", "Later", () => this.move(0.25)],
      ["All", "Show all time", () => this.show(0, data.length)], ["End", "Show the end", () => this.show(data.length * 0.95, data.length)],
    ]) {
      const button = make("button", { type: "button", text: label, title: name });
      button.setAttribute("aria-label", name);
      button.addEventListener("click", act);
      tools.append(button);
    }
    place.append(this.legend(), tools, this.box, this.tip);
    this.height = Math.min(height, 510);
    this.filler.style.height = `${Math.max(0, height - this.height)}px`;
    this.canvas.style.height = `${this.height}px`;
    this.box.addEventListener("scroll", () => this.draw());
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.offsetX - this.left) / this.span);
    }, { passive: false });
    new ResizeObserver(() => this.draw()).observe(this.box);
    redraws.push(() => this.draw());
  }

  legend() {
    const parts = [["step", "a step"], ["call", "calls of collectives"], ["wait", "waits in a call that never ended"], ["phase", "phase, as the heartbeat told"], ["moment", "something happened"]];
    const used = new Set(this.data.lanes.flatMap((lane) => lane.bars.map((bar) => bar[0])));
    const legend = make("div", { class: "legend" });
    parts.forEach(([name, text], kind) => {
      if (!used.has(kind)) return;
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = `var(--${name})`;
      legend.append(make("span", {}, swatch, text));
    });
    return legend;
  }

  show(from, to) {
    const span = Math.max(20, Math.min(this.data.length, to - from));
    this.from = Math.max(0, Math.min(from, this.data.length - span));
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, at = 0.5) {
    const span = (this.to - this.from) * factor;
    const fixed = this.from + (this.to - this.from) * at;
    this.show(fixed - span * at, fixed + span * (1 - at));
  }

  move(share) {
    const by = (this.to - this.from) * share;
    this.show(this.from + by, this.to + by);
  }

  key(event) {
    const acts = { ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(0, this.data.length) };
    if (acts[event.key]) { acts[event.key](); event.preventDefault(); }
  }

  x(us) { return this.left + ((us - this.from) / (this.to - this.from)) * this.span; }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.box.clientWidth;
    if (!width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const pen = this.pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    this.color = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    this.left = 14 + Math.max(...this.data.lanes.map((lane) => pen.measureText(`rank ${lane.rank}`).width));
    this.span = width - this.left - 10;
    const first = Math.floor(this.box.scrollTop / this.row);
    const last = Math.min(this.data.lanes.length, first + Math.ceil(this.height / this.row) + 1);
    this.first = first;
    for (let at = first; at < last; at += 1) this.drawLane(this.data.lanes[at], AXIS + at * this.row - this.box.scrollTop);
    this.drawAxis(width);
  }

  drawLane(lane, top) {
    const { pen, row } = this;
    const height = row - 3;
    pen.fillStyle = this.color("line");
    pen.fillRect(this.left, top + row - 2, this.span, 0.5);
    for (const [kind, start, length, number] of lane.bars) {
      if (start + length < this.from || start > this.to) continue;
      const x = Math.max(this.left, this.x(start));
      const end = Math.min(this.left + this.span, this.x(start + length));
      const width = Math.max(kind === STEP ? 0.6 : 1, end - x);
      if (kind === STEP) {
        pen.fillStyle = this.color(number % 2 ? "step2" : "step");
        pen.fillRect(x, top, width, height * 0.62);
      } else if (kind === CALL) {
        pen.fillStyle = this.color("call");
        pen.fillRect(x, top + height * 0.62, width, height * 0.38);
      } else if (kind === WAIT) {
        pen.fillStyle = this.color("wait");
        pen.fillRect(x, top, Math.max(2, width), height);
      } else if (kind === PHASE) {
        pen.fillStyle = this.color("phase");
        pen.fillRect(x, top + height - 2, width, 2);
      } else {
        pen.fillStyle = this.color("moment");
        pen.fillRect(x - 1, top - 1, 2.5, height + 2);
      }
    }
    if (row < 14 && this.data.lanes.indexOf(lane) % Math.ceil(14 / row)) return;
    pen.fillStyle = this.color("faint");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(`rank ${lane.rank}`, this.left - 6, top + height / 2);
  }

  drawAxis(width) {
    const { pen } = this;
    pen.fillStyle = this.color("panel");
    pen.fillRect(0, 0, width, AXIS - 2);
    pen.textBaseline = "middle";
    const step = niceStep(this.to - this.from, Math.max(2, this.span / 120));
    for (let us = Math.ceil(this.from / step) * step; us <= this.to; us += step) {
      pen.fillStyle = this.color("line");
      pen.fillRect(this.x(us), AXIS - 6, 1, 6);
      pen.fillStyle = this.color("faint");
      pen.textAlign = this.x(us) > width - 40 ? "right" : this.x(us) < this.left + 20 ? "left" : "center";
      pen.fillText(duration(us), this.x(us), AXIS / 2 - 1);
    }
  }

  point(event) {
    const at = Math.floor((event.offsetY + this.box.scrollTop - AXIS) / this.row);
    const lane = this.data.lanes[at];
    if (!lane) { this.tip.textContent = ""; return; }
    const us = this.from + ((event.offsetX - this.left) / this.span) * (this.to - this.from);
    const slack = (3 / this.span) * (this.to - this.from);
    const hits = lane.bars.filter(([, start, length]) => start - slack <= us && us <= start + length + slack);
    const order = [MOMENT, WAIT, CALL, STEP, PHASE];
    hits.sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]) || a[2] - b[2]);
    const parts = [...new Set(hits.slice(0, 3).map((bar) => this.words(bar)))];
    const left = lane.left_out ? `, ${lane.left_out} earlier events are left out` : "";
    this.tip.textContent = `rank ${lane.rank} at ${duration(us)}${left}${parts.length ? ": " : ""}${parts.join("; ")}`;
  }

  words([kind, , length, first, last, text, merged]) {
    const numbers = first === last ? `${first}` : `${first} to ${last}`;
    const what = this.data.texts[text];
    if (kind === STEP) return `step${merged > 1 ? "s" : ""} ${numbers} (${duration(length)})`;
    if (kind === CALL) return merged > 1 ? `${merged} calls${what ? `: ${what}` : ""}` : `#${first} ${what}`;
    if (kind === WAIT) return `waits for ${duration(length)} in #${first} ${what}`;
    return kind === PHASE ? `phase ${what}` : what;
  }
}

if (DATA.lanes) new Lanes(DATA.lanes, byId("lanes-view"));
