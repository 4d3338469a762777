"use strict";
// Findings: search, severities, keys, and the choice of dark or light.
const byId = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") element.className = value;
    else if (key === "text") element.textContent = value;
    else if (key.includes("-") || key === "role" || key === "scope" || key === "colspan") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
};
const draw = (tag, attributes = {}, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
};
const DATA = JSON.parse(byId("data").textContent);
const redraws = [];

const findings = [...document.querySelectorAll("article.finding")];
const words = new Map(findings.map((each) => [each, each.textContent.toLowerCase()]));

function filterFindings() {
  const search = byId("search");
  if (!search) return;
  const parts = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = new Set([...document.querySelectorAll("input.severity:checked")].map((box) => box.value));
  let shown = 0;
  for (const finding of findings) {
    const fits = chosen.has(finding.dataset.severity) && parts.every((part) => words.get(finding).includes(part));
    finding.hidden = !fits;
    shown += fits ? 1 : 0;
  }
  byId("shown").textContent = shown === findings.length ? "" : `${shown} of ${findings.length} shown`;
  byId("no-match").hidden = shown > 0;
}

function stepTo(direction) {
  const visible = findings.filter((each) => !each.hidden);
  if (!visible.length) return;
  const here = visible.indexOf(document.activeElement?.closest("article.finding"));
  const next = here < 0 ? (direction > 0 ? 0 : visible.length - 1) : here + direction;
  const target = visible[Math.max(0, Math.min(visible.length - 1, next))];
  target.focus({ preventScroll: true });
  target.scrollIntoView({ block: "start" });
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  redraws.forEach((redraw) => redraw());
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input[type=search], select, textarea");
  if (event.key === "Escape" && isTyping) { event.target.blur(); return; }
  if (isTyping || byId("help").open) return;
  if (event.key === "Enter") {
    const details = event.target.matches("article.finding") && event.target.querySelector("details");
    if (details) { details.open = !details.open; event.preventDefault(); }
    return;
  }
  const acts = {
    "/": () => byId("search")?.focus(),
    "?": () => byId("help").showModal(),
    j: () => stepTo(1),
    k: () => stepTo(-1),
    t: switchTheme,
  };
  if (acts[event.key]) { acts[event.key](); event.preventDefault(); }
}

byId("search")?.addEventListener("input", filterFindings);
document.querySelectorAll("input.severity").forEach((box) => box.addEventListener("change", filterFindings));
byId("theme").addEventListener("click", switchTheme);
byId("help-button").addEventListener("click", () => byId("help").showModal());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
document.addEventListener("keydown", onKey);
