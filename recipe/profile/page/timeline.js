// One step of every rank on a canvas, with zoom: bars of transfers above, of work below.
"use strict";

class Timeline {
  constructor(figure, data) {
    this.ranks = data.timeline.ranks;
    this.parts = data.timeline.parts;
    this.names = data.timeline.names;
    this.end = Math.max(1e-9, ...this.ranks.flatMap((rank) => [...rank.work, ...rank.transfers].map((bar) => bar[1])));
    this.from = 0;
    this.to = this.end;
    this.left = 62;
    this.foot = 30;
    this.row = this.ranks.length > 8 ? 34 : this.ranks.length > 3 ? 48 : 66;
    this.canvas = html("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("aria-label", "Timeline of one step");
    figure.append(this.canvas);
    legend(figure, [...this.used()].map((kind) => [nameOf(kind), kind]));
    this.listen();
  }
  used() {
    const kinds = new Set(this.ranks.flatMap((rank) => rank.work.map((bar) => this.parts[bar[2]].kind)));
    return [...KINDS.filter((kind) => kinds.has(kind)), "hidden", "exposed", "waiting"];
  }
  listen() {
    const { canvas } = this;
    let start = null;
    canvas.addEventListener("mousedown", (event) => { start = event.offsetX; });
    canvas.addEventListener("mousemove", (event) => {
      if (start !== null && Math.abs(event.offsetX - start) > 3) { this.draw([start, event.offsetX]); hideTip(); } else this.hover(event);
    });
    canvas.addEventListener("mouseup", (event) => {
      if (start !== null && Math.abs(event.offsetX - start) > 6) {
        const [a, b] = [start, event.offsetX].sort((p, q) => p - q).map((x) => this.time(x));
        this.show(a, b);
      } else this.draw();
      start = null;
    });
    canvas.addEventListener("mouseleave", () => { hideTip(); if (start !== null) { start = null; this.draw(); } });
    canvas.addEventListener("dblclick", () => this.show(0, this.end));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      this.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const width = this.to - this.from, moves = { ArrowLeft: -0.2, ArrowRight: 0.2 };
      if (event.key in moves) this.show(this.from + width * moves[event.key], this.to + width * moves[event.key]);
      else if (event.key === "+" || event.key === "=") this.zoom(0.67);
      else if (event.key === "-") this.zoom(1.5);
      else if (event.key === "0") this.show(0, this.end);
      else return;
      event.preventDefault();
    });
  }
  time(x) { return this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from); }
  place(time) { return this.left + ((time - this.from) / (this.to - this.from)) * (this.width - this.left); }
  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }
  show(from, to) {
    const width = Math.min(Math.max(to - from, this.end / 1e5), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - width);
    this.to = this.from + width;
    this.draw();
  }
  draw(brush = null) {
    const { canvas } = this, scale = window.devicePixelRatio || 1;
    this.width = canvas.parentElement.clientWidth;
    const height = this.ranks.length * this.row + this.foot;
    canvas.width = this.width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    this.drawAxis(pen, height);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.width - this.left, height - this.foot);
    pen.clip();
    this.ranks.forEach((rank, i) => this.drawRank(pen, rank, i * this.row));
    if (brush) {
      pen.fillStyle = colour("faint");
      pen.globalAlpha = 0.25;
      pen.fillRect(Math.min(...brush), 0, Math.abs(brush[1] - brush[0]), height - this.foot);
    }
    pen.restore();
  }
  drawAxis(pen, height) {
    const span = this.to - this.from, step = ticks(span, 8)[1] || span;
    pen.textAlign = "center";
    for (let i = Math.ceil(this.from / step); i * step <= this.to; i += 1) {
      const x = this.place(i * step);
      pen.fillStyle = colour("grid");
      pen.fillRect(x, 0, 1, height - this.foot);
      pen.fillStyle = colour("faint");
      if (x < this.width - 20) pen.fillText(seconds(i * step), x, height - 12);
    }
    pen.textAlign = "right";
    pen.fillStyle = colour("ink");
    this.ranks.forEach((rank, i) => pen.fillText(`rank ${rank.rank}`, this.left - 10, i * this.row + this.row / 2 + 3));
  }
  drawRank(pen, rank, y) {
    const [upper, lower] = this.lanes(y);
    const fill = (start, end, kind, lane) => {
      const x = this.place(start), width = Math.max(this.place(end) - x, 0.6);
      if (x > this.width || x + width < this.left) return;
      pen.fillStyle = this.colours[kind] || this.colours.other;
      pen.fillRect(x, lane.y, width, lane.height);
    };
    pen.fillStyle = colour("idle");
    pen.globalAlpha = 0.45;
    pen.fillRect(this.left, lower.y, this.width - this.left, lower.height);
    pen.globalAlpha = 1;
    this.colours = Object.fromEntries([...KINDS, "hidden", "exposed", "waiting"].map((kind) => [kind, colour(kind)]));
    for (const [start, end, part] of rank.work) fill(start, end, this.parts[part].kind, lower);
    // Waiting is at a transfer's start; what follows is drawn as what most of it is.
    for (const bar of rank.transfers) {
      const [start, end, , , , hidden, exposed, waiting] = bar, moves = Math.min(start + waiting, end);
      if (waiting > 0) fill(start, moves, "waiting", upper);
      if (end > moves) fill(moves, end, hidden > exposed ? "hidden" : "exposed", upper);
    }
  }
  lanes(y) {
    const tall = this.row - 14;
    return [{ y: y + 3, height: tall * 0.36 }, { y: y + 4 + tall * 0.36, height: tall * 0.64 }];
  }
  hover(event) {
    const rank = this.ranks[Math.floor(event.offsetY / this.row)];
    if (!rank || event.offsetX < this.left) return hideTip();
    const [upper, lower] = this.lanes(Math.floor(event.offsetY / this.row) * this.row), time = this.time(event.offsetX);
    const slack = ((this.to - this.from) / this.width) * 1.5, under = (bar) => bar[0] - slack <= time && time <= bar[1] + slack;
    if (event.offsetY >= lower.y) {
      const bar = rank.work.find(under);
      if (!bar) return hideTip();
      const part = this.parts[bar[2]], layer = part.layer === null ? "" : `, layer ${part.layer}`;
      const many = bar[3] > 1 ? `${bar[3]} operators, the longest ${this.names[bar[4]]}` : this.names[bar[4]];
      return showTip(`${nameOf(part.kind)}${layer}, ${part.phase}\n${seconds(bar[1] - bar[0])} from ${seconds(bar[0])}\n${many}`, event);
    }
    const bar = event.offsetY >= upper.y ? rank.transfers.find(under) : null;
    if (!bar) return hideTip();
    const [start, end, op, part, sent, hidden, exposed, waiting] = bar, { kind, layer, phase } = this.parts[part];
    const size = sent === null ? "" : `\n${bytes(sent)} sent`;
    return showTip(`${op} for ${kind}${layer === null ? "" : `, layer ${layer}`}, ${phase}\n${seconds(end - start)}: ${seconds(hidden)} hidden, ${seconds(exposed)} exposed, ${seconds(waiting)} waiting${size}`, event);
  }
}
