// The charts that are drawn once for a width: ranks, layers, transfers, bandwidth, imbalance, memory.
"use strict";

// Seconds of a row as one number: the mean over ranks.
const meanOf = (row) => mean(row.seconds);

// The height that lets a chart end where the one to its left does.
function beside(other, foot) {
  return Math.min(Math.max(document.getElementById(other).clientHeight - foot - 80, 240), 420);
}

function stateKind(row) { return row.state === "work" ? row.part.kind : row.state; }

function drawRanks(figure, data) {
  const kinds = [...KINDS, ...STATES];
  const totals = data.ranks.map((_, r) => sum(data.time.map((row) => row.seconds[r])));
  const chosen = someOf(data.ranks.length, 48, totals.indexOf(Math.max(...totals)));
  const height = 22, gap = chosen.length > 16 ? 3 : 8, left = 62, right = 70, foot = 34;
  const { node, width } = canvasOf(figure, chosen.length * (height + gap) + foot, "Time of a step by rank and kind");
  const most = Math.max(...totals), x = (s) => left + (s / most) * (width - left - right);
  for (const tick of ticks(most, 6)) {
    const bottom = chosen.length * (height + gap);
    node.append(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: bottom }));
    node.append(text(x(tick), bottom + 15, seconds(tick), { anchor: "middle", cls: "axis" }));
  }
  node.append(text(x(most / 2), chosen.length * (height + gap) + 32, "time of a step", { anchor: "middle", cls: "axis" }));
  chosen.forEach((r, i) => {
    const y = i * (height + gap);
    let start = 0;
    node.append(text(left - 10, y + 15, `rank ${data.ranks[r]}`, { anchor: "end", cls: "strong" }));
    for (const kind of kinds) {
      const rows = data.time.filter((row) => stateKind(row) === kind), value = sum(rows.map((row) => row.seconds[r]));
      if (!value) continue;
      const words = `rank ${data.ranks[r]}: ${nameOf(kind)}\n${seconds(value)}, ${percent(value / totals[r])} of its step`;
      node.append(bar(x(start), y, x(start + value) - x(start), height, kind, words));
      start += value;
    }
    node.append(text(x(start) + 8, y + 15, seconds(totals[r])));
  });
  const used = kinds.filter((kind) => data.time.some((row) => stateKind(row) === kind && sum(row.seconds) > 0));
  legend(figure, used.map((kind) => [nameOf(kind), kind]));
  if (chosen.length < data.ranks.length) figure.append(html("p", { className: "lead" }, `${chosen.length} of ${data.ranks.length} ranks, the slowest among them.`));
}

// The rows of the time table that a column of the layer chart holds, in the phases that are asked for.
function layerColumns(data, phases) {
  const rows = data.time.filter((row) => row.part && (!phases.length || phases.includes(row.part.phase)));
  const layers = [...new Set(rows.map((row) => row.part.layer).filter((layer) => layer !== null))].sort((a, b) => a - b);
  const columns = layers.map((layer) => ({ name: String(layer), rows: rows.filter((row) => row.part.layer === layer) }));
  const outside = rows.filter((row) => row.part.layer === null);
  if (outside.length) columns.push({ name: "outside", rows: outside });
  return columns;
}

function drawLayers(figure, data, phases) {
  const columns = layerColumns(data, phases), kinds = [...KINDS, "exposed", "waiting"];
  if (!columns.length) return nothing(figure, "Nothing of this phase was recorded.");
  const left = 58, top = 8, tall = 240, foot = 42;
  const { node, width } = canvasOf(figure, top + tall + foot, "Time of each layer by kind");
  const most = Math.max(...columns.map((column) => sum(column.rows.map(meanOf)))) || 1;
  const y = (s) => top + tall - (s / most) * tall, step = (width - left) / columns.length, wide = Math.min(step * 0.78, 86);
  for (const tick of ticks(most, 5)) {
    node.append(svg("line", { class: tick ? "grid" : "base", x1: left, x2: width, y1: y(tick), y2: y(tick) }));
    node.append(text(left - 8, y(tick) + 4, seconds(tick), { anchor: "end", cls: "axis" }));
  }
  const every = Math.ceil(columns.length / Math.floor((width - left) / 34));
  columns.forEach((column, i) => {
    const x = left + i * step + (step - wide) / 2;
    let from = 0;
    for (const kind of kinds) {
      const rows = column.rows.filter((row) => stateKind(row) === kind), value = sum(rows.map(meanOf));
      if (!value) continue;
      const where = column.name === "outside" ? "outside the layers" : `layer ${column.name}`;
      const parts = kind === "exposed" || kind === "waiting"
        ? rows.sort((a, b) => meanOf(b) - meanOf(a)).slice(0, 4).map((row) => `\n${row.op} for ${row.part.kind}, ${row.part.phase}: ${seconds(meanOf(row))}`)
        : rows.map((row) => `\n${row.part.phase}: ${seconds(meanOf(row))}`);
      node.append(bar(x, y(from + value), wide, y(from) - y(from + value), kind, `${where}: ${nameOf(kind)}\n${seconds(value)}${parts.join("")}`));
      from += value;
    }
    if (column.name === "outside" || i % every === 0) node.append(text(x + wide / 2, top + tall + 16, column.name, { anchor: "middle", cls: "axis" }));
  });
  node.append(text(left + (width - left) / 2, top + tall + 36, "layer", { anchor: "middle", cls: "axis" }));
  const used = kinds.filter((kind) => columns.some((column) => column.rows.some((row) => stateKind(row) === kind)));
  legend(figure, used.map((kind) => [nameOf(kind), kind]));
}

function drawTransfers(figure, data) {
  const rows = data.transfers.slice(0, 12), parts = ["hidden", "exposed", "waiting"];
  if (!rows.length) return nothing(figure, "There are no transfers between ranks in these steps.");
  const line = 42, foot = 34, right = 12;
  const { node, width } = canvasOf(figure, rows.length * line + foot, "Hidden, exposed and waiting time of the transfers");
  const most = Math.max(...rows.map((row) => sum(parts.map((part) => row[`${part}_s`])))) || 1, x = (s) => (s / most) * (width - right);
  for (const tick of ticks(most, 5)) {
    node.append(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: rows.length * line }));
    node.append(text(x(tick), rows.length * line + 14, seconds(tick), { anchor: tick ? "middle" : "start", cls: "axis" }));
  }
  rows.forEach((row, i) => {
    const sent = row.sent_bytes === null ? "bytes not in the trace" : `${bytes(row.sent_bytes)} sent`;
    const title = text(0, i * line + 13, `${row.route.op} for ${row.route.purpose}`, { cls: "strong" });
    title.append(svg("tspan", { dx: 7, class: "axis" }, `${row.route.among} · ${digits(row.num_calls)} calls · ${sent}`));
    node.append(title);
    let start = 0;
    for (const part of parts) {
      const value = row[`${part}_s`], words = { hidden: "behind work", exposed: "moving, with no work beside it", waiting: "waiting for slower ranks" };
      if (value > 0) node.append(bar(x(start), i * line + 19, x(value), 13, part, `${row.route.op} for ${row.route.purpose}, ${row.route.among}\n${seconds(value)} of a step ${words[part]}`));
      start += value;
    }
  });
  node.append(text(width / 2, rows.length * line + 31, "time of a step, mean over ranks", { anchor: "middle", cls: "axis" }));
  legend(figure, parts.map((part) => [nameOf(part), part]));
  if (rows.length < data.transfers.length) figure.append(html("p", { className: "lead" }, `The ${rows.length} longest of ${data.transfers.length}; all are in the table below.`));
}

function drawBandwidth(figure, data) {
  const points = data.points;
  if (!points.length) return nothing(figure, "These traces do not say how much their collectives carry.");
  const left = 68, top = 10, foot = 42, right = 14, tall = beside("transfers", foot);
  const { node, width } = canvasOf(figure, top + tall + foot, "Achieved bandwidth by bytes sent");
  const links = [...new Set(points.map((point) => point.link_bytes_per_s).filter(Boolean))];
  const sizes = points.map((point) => point.sent_bytes), rates = points.flatMap((point) => [point.lowest, point.highest]).concat(links);
  const xs = powersOfTen(Math.min(...sizes), Math.max(...sizes) * 1.01), ys = powersOfTen(Math.min(...rates), Math.max(...rates) * 1.01);
  const scale = (ticksOf, from, to) => (v) => from + ((Math.log10(v) - Math.log10(ticksOf[0])) / (Math.log10(ticksOf[ticksOf.length - 1]) - Math.log10(ticksOf[0]) || 1)) * (to - from);
  const x = scale(xs, left, width - right), y = scale(ys, top + tall, top);
  const everyX = Math.ceil(xs.length / Math.max(2, Math.floor((width - left) / 62)));
  xs.forEach((tick, i) => {
    node.append(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: top + tall }));
    if (i % everyX === 0) node.append(text(x(tick), top + tall + 16, bytes(tick), { anchor: "middle", cls: "axis" }));
  });
  for (const tick of ys) {
    node.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    node.append(text(left - 8, y(tick) + 4, rate(tick), { anchor: "end", cls: "axis" }));
  }
  for (const link of links) {
    node.append(svg("line", { x1: left, x2: width - right, y1: y(link), y2: y(link), stroke: colour("soft"), "stroke-width": 1.5, "stroke-dasharray": "6 4" }));
    node.append(text(left + 6, y(link) - 6, `link ${rate(link)}`, { cls: "strong" }));
  }
  for (const point of points) {
    const { route } = point, part = colour(route.purpose), of = point.link_bytes_per_s ? `\n${percent(point.bytes_per_s / point.link_bytes_per_s)} of the link` : "";
    const words = `${route.op} for ${route.purpose}, ${route.among}\n${bytes(point.sent_bytes)} sent, ${point.num_calls} calls\nmedian ${rate(point.bytes_per_s)}, from ${rate(point.lowest)} to ${rate(point.highest)}${of}`;
    node.append(svg("line", { x1: x(point.sent_bytes), x2: x(point.sent_bytes), y1: y(point.lowest), y2: y(point.highest), stroke: part, "stroke-width": 2, opacity: 0.35 }));
    node.append(svg("circle", { cx: x(point.sent_bytes), cy: y(point.bytes_per_s), r: 5.5, fill: part, stroke: colour("card"), "stroke-width": 1.5, "data-tip": words }));
  }
  node.append(text(left + (width - left) / 2, top + tall + 36, "bytes that a rank sends in one collective", { anchor: "middle", cls: "axis" }));
  legend(figure, [...new Set(points.map((point) => point.route.purpose))].map((kind) => [nameOf(kind), kind]), { dots: true });
}

function drawImbalance(figure, data) {
  const rows = data.imbalance.filter((row) => sum(row.seconds) > 0);
  if (data.ranks.length < 2) return nothing(figure, "It takes the traces of two ranks or more to see an imbalance.");
  const left = 128, right = 56, line = 34, foot = 36;
  const { node, width } = canvasOf(figure, rows.length * line + foot, "Work by kind on every rank over the mean of the ranks");
  const most = Math.max(1.2, ...rows.map((row) => row.max_over_mean)) * 1.03, x = (v) => left + (v / most) * (width - left - right);
  for (const tick of ticks(most, 5)) {
    node.append(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: rows.length * line }));
    node.append(text(x(tick), rows.length * line + 15, `${digits(tick)}×`, { anchor: "middle", cls: "axis" }));
  }
  node.append(svg("line", { x1: x(1), x2: x(1), y1: 0, y2: rows.length * line, stroke: colour("faint"), "stroke-dasharray": "3 3" }));
  node.append(text(x(most / 2), rows.length * line + 33, "time over the mean of the ranks", { anchor: "middle", cls: "axis" }));
  rows.forEach((row, i) => {
    const y = i * line + line / 2, average = mean(row.seconds), busiest = row.seconds.indexOf(Math.max(...row.seconds));
    node.append(text(left - 12, y + 4, shortName(row.kind), { anchor: "end", cls: "strong" }));
    const lowest = Math.min(...row.seconds) / average;
    node.append(svg("line", { x1: x(lowest), x2: x(row.max_over_mean), y1: y, y2: y, stroke: colour(row.kind), "stroke-width": 3, opacity: 0.3 }));
    for (const r of someOf(data.ranks.length, 64, busiest)) {
      const words = `${nameOf(row.kind)} on rank ${data.ranks[r]}\n${seconds(row.seconds[r])}, ${digits(row.seconds[r] / average)} times the mean`;
      node.append(svg("circle", { cx: x(row.seconds[r] / average), cy: y, r: 5, fill: colour(row.kind), "fill-opacity": r === busiest ? 1 : 0.6, stroke: colour("card"), "data-tip": words }));
    }
    node.append(text(x(row.max_over_mean) + 11, y + 4, digits(row.max_over_mean)));
  });
  figure.append(html("p", { className: "lead" }, "The number is the busiest rank's. A kind that takes little time may well be uneven: see the bars above for what it costs."));
}

function drawMemory(figure, data) {
  const lines = data.memory;
  document.getElementById("memory-lead").textContent = !lines.length ? "" : lines[0].on_gpu
    ? "What torch's allocator has given out on the GPU, over the recorded steps."
    : `Memory of tensors on the CPU, over the recorded steps${lines[0].whole ? "" : ", counted from the recording's start"}.`;
  if (!lines.length) return nothing(figure, "Memory was not recorded; profile_memory=True does it.");
  const chosen = someOf(lines.length, 8, lines.findIndex((line) => line.peak_bytes === Math.max(...lines.map((other) => other.peak_bytes))));
  const palette = ["attention", "experts", "router", "head", "embedding", "optimizer", "dense", "other"];
  const left = 68, top = 10, foot = 42, right = 14, tall = beside("imbalance", foot);
  const { node, width } = canvasOf(figure, top + tall + foot, "Memory over time");
  const end = Math.max(...chosen.map((i) => lines[i].points[lines[i].points.length - 1][0])) || 1;
  const most = Math.max(1, ...chosen.map((i) => lines[i].peak_bytes)), unit = 1024 ** Math.max(0, Math.floor(Math.log(most) / Math.log(1024)));
  const x = (t) => left + (t / end) * (width - left - right), y = (b) => top + tall - (b / (most * 1.05)) * tall;
  for (const tick of ticks((most * 1.05) / unit, 5)) {
    node.append(svg("line", { class: tick ? "grid" : "base", x1: left, x2: width - right, y1: y(tick * unit), y2: y(tick * unit) }));
    node.append(text(left - 8, y(tick * unit) + 4, tick ? `${digits(tick)} ${bytes(unit, 1024).slice(2)}` : "0", { anchor: "end", cls: "axis" }));
  }
  for (const tick of ticks(end, 5)) node.append(text(x(tick), top + tall + 16, seconds(tick), { anchor: "middle", cls: "axis" }));
  node.append(text(left + (width - left) / 2, top + tall + 36, "time since the first recorded step", { anchor: "middle", cls: "axis" }));
  chosen.forEach((i, n) => {
    const { points } = lines[i];
    let path = `M${x(points[0][0])} ${y(points[0][1])}`;
    for (const [time, held] of points.slice(1)) path += `H${x(time).toFixed(1)}V${y(held).toFixed(1)}`;
    node.append(svg("path", { d: path, fill: "none", stroke: colour(palette[n]), "stroke-width": 1.6, "stroke-linejoin": "round" }));
    const highest = points.reduce((a, b) => (b[1] > a[1] ? b : a));
    node.append(svg("circle", { cx: x(highest[0]), cy: y(highest[1]), r: 4, fill: colour(palette[n]), stroke: colour("card"), "data-tip": `rank ${lines[i].rank}: the peak\n${bytes(lines[i].peak_bytes, 1024)} at ${seconds(highest[0])}` }));
  });
  legend(figure, chosen.map((i, n) => [`rank ${lines[i].rank}, peak ${bytes(lines[i].peak_bytes, 1024)}`, palette[n]]));
}
