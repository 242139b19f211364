// What all charts share: numbers in words, colours, SVG elements, axes, legends and the tooltip.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const NAMES = {
  attention: "attention", experts: "experts", dense: "dense feed-forward", router: "router", norms: "norms and rest of a block",
  embedding: "embedding and inputs", head: "head and loss", optimizer: "optimizer", gradients: "gradients", products: "matrix products",
  other: "other work", routing: "routing", exposed: "exposed transfer", waiting: "waiting", hidden: "hidden", copies: "copies", idle: "idle",
};
const KINDS = ["attention", "experts", "dense", "router", "norms", "embedding", "head", "products", "gradients", "optimizer", "other"];
const STATES = ["exposed", "waiting", "copies", "idle"];

const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => (values.length ? sum(values) / values.length : 0);
const nameOf = (kind) => NAMES[kind] || kind;
const shortName = (kind) => ({ norms: "norms, rest", embedding: "embedding", dense: "dense" })[kind] || nameOf(kind);

function digits(value) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}
function seconds(value) {
  if (value >= 0.9995) return `${digits(value)} s`;
  if (value >= 0.0009995) return `${digits(value * 1e3)} ms`;
  return value > 0 ? `${digits(value * 1e6)} µs` : "0";
}
function bytes(value, powers = 1000) {
  const units = powers === 1024 ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (value >= powers * 0.9995 && i < units.length - 1) { value /= powers; i += 1; }
  return `${digits(value)} ${units[i]}`;
}
const rate = (value) => `${bytes(value)}/s`;
const percent = (share) => `${digits(100 * share)} %`;

function colour(kind) {
  const style = getComputedStyle(document.documentElement);
  return (style.getPropertyValue(`--${kind}`) || style.getPropertyValue("--other")).trim();
}
function html(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}
function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function text(x, y, words, { anchor = "start", cls = "" } = {}) {
  return svg("text", { x, y, "text-anchor": anchor, class: cls }, words);
}
function bar(x, y, width, height, kind, tip) {
  return svg("rect", { x, y, width: Math.max(width, 0), height, fill: colour(kind), "data-tip": tip });
}
function canvasOf(figure, height, label) {
  const width = figure.clientWidth || 600;
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  figure.append(node);
  return { node, width, height };
}
// Round numbers from 0 to about `most`, at most `count` of them.
function ticks(most, count = 5) {
  if (!(most > 0)) return [0];
  const raw = most / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let i = 0; i * step <= most * 1.0001; i += 1) found.push(i * step);
  return found;
}
function powersOfTen(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) found.push(10 ** p);
  return found;
}
function legend(figure, entries, { dots = false } = {}) {
  const list = html("ul", { className: "legend" });
  for (const [words, kind] of entries) {
    const mark = html("i", { className: dots ? "dot" : "" });
    mark.style.background = colour(kind);
    list.append(html("li", {}, mark, words));
  }
  figure.append(list);
}
function nothing(figure, words) {
  figure.append(html("div", { className: "nothing" }, words));
}
// At most `most` places among so many, evenly apart, with one that must be there.
function someOf(count, most, needed) {
  if (count <= most) return [...Array(count).keys()];
  const chosen = new Set([needed]);
  for (let i = 0; i < most; i += 1) chosen.add(Math.round((i * (count - 1)) / (most - 1)));
  return [...chosen].sort((a, b) => a - b);
}
function table(place, head, rows) {
  const cells = (values, tag) => values.map((value, i) =>
    html(tag, { className: typeof value === "string" && (tag === "td" ? i < head.words : i < head.words) ? "word" : "" }, String(value)));
  place.append(html("table", {},
    html("thead", {}, html("tr", {}, ...cells(head.names, "th"))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...cells(row, "td"))))));
}

const tip = document.getElementById("tip");
function showTip(words, event) {
  tip.textContent = words;
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), edge = 14;
  const left = event.clientX + edge + box.width > innerWidth ? event.clientX - edge - box.width : event.clientX + edge;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(event.clientY + edge, innerHeight - box.height - 4)}px`;
}
function hideTip() { tip.hidden = true; }
document.addEventListener("mousemove", (event) => {
  const marked = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (marked) showTip(marked.getAttribute("data-tip"), event);
  else hideTip();
});
