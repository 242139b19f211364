// Puts the page together from the summary that lies in it.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const figureOf = (id) => document.getElementById(id);
const stateSeconds = (state) => sum(data.time.filter((row) => row.state === state).map(meanOf));

function describe() {
  const { facts, layout } = data, words = [];
  if (layout) words.push(`dp=${layout.dp} tp=${layout.tp} ep=${layout.ep}`, `ZeRO-${facts.zero_stage}`, facts.precision);
  if (facts.num_sequences) words.push(`${facts.num_sequences} × ${facts.block_size} tokens a micro-batch`);
  const steps = data.steps.length === 1 ? `step ${data.steps[0]}` : `steps ${data.steps[0]} to ${data.steps[data.steps.length - 1]}`;
  words.push(`${data.ranks.length}${data.ranks.length < data.world_size ? ` of ${data.world_size}` : ""} ranks on ${data.device === "cuda" ? "GPUs" : "CPU"}`);
  if (data.steps.length > 1 || data.steps[0]) words.push(steps);
  figureOf("title").textContent = data.title;
  figureOf("facts").textContent = words.join("  ·  ");
}

function fillTiles() {
  const work = stateSeconds("work"), hidden = sum(data.transfers.map((row) => row.hidden_s)), exposed = stateSeconds("exposed");
  const moving = hidden + exposed, peak = Math.max(0, ...data.memory.map((line) => line.peak_bytes));
  const whole = sum(data.time.map(meanOf)) || 1;
  const tiles = [
    [seconds(data.step_s), "a step, slowest rank", null],
    [percent(work / whole), "work", "attention"],
    [seconds(exposed), `exposed transfer, ${percent(exposed / whole)}`, "exposed"],
    [moving ? percent(hidden / moving) : "–", "of transfers hidden", "hidden"],
    [seconds(stateSeconds("waiting")), "waiting for slower ranks", "waiting"],
    [seconds(stateSeconds("idle")), `idle, ${percent(stateSeconds("idle") / whole)}`, "idle"],
  ];
  if (peak) tiles.push([bytes(peak, 1024), data.memory[0].whole ? "memory at its peak" : "memory at its peak, of what was added", "router"]);
  for (const [value, words, kind] of tiles) {
    const mark = html("i");
    if (kind) mark.style.background = colour(kind);
    figureOf("tiles").append(html("div", { className: "tile" }, html("b", {}, value), html("span", {}, ...(kind ? [mark] : []), words)));
  }
}

function fillSavings() {
  data.savings.slice(0, 3).forEach((saving, i) => {
    const share = saving.seconds / data.step_s, fill = html("div");
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    figureOf("savings").append(html("div", { className: "saving" },
      html("div", { className: "rank" }, `${["largest", "second", "third"][i]} saving · up to ${percent(share)} of the step`),
      html("h3", {}, saving.title), html("div", { className: "meter" }, fill), html("p", {}, saving.words)));
  });
  if (!data.savings.length) figureOf("savings").append(html("div", { className: "saving" }, html("h3", {}, "Nothing stands out that would save a noticeable part of the step.")));
}

function fillMethod() {
  const fixed = [
    "A moment with work is work, and a transfer in it is hidden, also where several run at once: unions of intervals, not sums of durations.",
    "A collective moves once its last rank has come. The rank on which it is shortest came last; what it takes longer on the others is waiting. No clock is compared with another's.",
    "Bytes are what the algorithm has to send from a rank: gathers, scatters and all-reduces as a ring, exchanges all but a rank's own part.",
  ];
  for (const words of [...fixed, ...data.notes]) figureOf("notes").append(html("li", {}, `${words[0].toUpperCase()}${words.slice(1)}${words.endsWith(".") ? "" : "."}`));
  table(figureOf("transfer-table"), { words: 3, names: ["collective", "for", "among", "calls", "sent", "hidden", "exposed", "waiting", "achieved", "of the link"] },
    data.transfers.map((row) => [row.route.op, row.route.purpose, row.route.among, digits(row.num_calls), row.sent_bytes === null ? "–" : bytes(row.sent_bytes),
      seconds(row.hidden_s), seconds(row.exposed_s), seconds(row.waiting_s), row.bytes_per_s ? rate(row.bytes_per_s) : "–",
      row.bytes_per_s && row.link_bytes_per_s ? percent(row.bytes_per_s / row.link_bytes_per_s) : "–"]));
  table(figureOf("time-table"), { words: 5, names: ["state", "of", "layer", "phase", "collective", "mean", "most"] },
    data.time.slice(0, 400).map((row) => [row.state, row.part ? row.part.kind : "", row.part && row.part.layer !== null ? String(row.part.layer) : "", row.part ? row.part.phase : "",
      row.op || "", seconds(meanOf(row)), seconds(Math.max(...row.seconds))]));
}

let phases = [];
function buttons(place, entries, pressed) {
  place.replaceChildren(...entries.map(([words, act], i) => {
    const button = html("button", { type: "button", onclick: act }, words);
    if (pressed !== undefined) button.setAttribute("aria-pressed", String(i === pressed));
    return button;
  }));
}
function choosePhases() {
  const present = ["forward", "backward", "recompute", "update"].filter((phase) => data.time.some((row) => row.part && row.part.phase === phase));
  const entries = [["all", []], ...present.map((phase) => [phase, [phase]])];
  const draw = (i) => {
    phases = entries[i][1];
    buttons(figureOf("phases"), entries.map(([words], n) => [words, () => draw(n)]), i);
    redraw(["layers"]);
  };
  buttons(figureOf("phases"), entries.map(([words], n) => [words, () => draw(n)]), 0);
}

const charts = {
  ranks: drawRanks, layers: (figure) => drawLayers(figure, data, phases), transfers: drawTransfers, bandwidth: drawBandwidth,
  imbalance: drawImbalance, memory: drawMemory, // after the charts to the left of them
};
function redraw(names = Object.keys(charts)) {
  for (const name of names) {
    figureOf(name).replaceChildren();
    charts[name](figureOf(name), data);
  }
}

describe();
fillTiles();
fillSavings();
fillMethod();
choosePhases();
redraw();
Object.assign(figureOf("timeline"), { href: data.timeline, textContent: data.timeline });
let pending = 0;
const again = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => redraw()); };
addEventListener("resize", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
document.documentElement.dataset.drawn = "true";
