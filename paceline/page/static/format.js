"use strict";
/* Elements and numbers. Text of models and data enters the page only as text nodes. */

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "color") made.style.background = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (child !== null && child !== undefined) made.append(child);
  return made;
}

const $ = (id) => document.getElementById(id);

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 60) return `${(value / 60).toFixed(1)} min`;
  return value >= 1 ? `${number(value, 3)} s` : `${number(value * 1000, 3)} ms`;
}

function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1).replace(/\.0$/, "")} %`;
}

/* Control characters. The group lets split() return them, at the odd positions. */
const CONTROL = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069])/;

/* Text with a visible mark for each control character: escape sequences stay harmless. */
function shown(text) {
  const parts = document.createDocumentFragment();
  String(text).split(CONTROL).forEach((piece, index) => {
    if (!piece) return;
    if (index % 2 === 0) return parts.append(piece);
    const code = piece.charCodeAt(0);
    const mark = code < 32 ? String.fromCharCode(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
    parts.append(element("span", { class: "control", title: `character ${code}` }, mark));
  });
  return parts;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const runColor = (index) => style(`--c${index % 6}`);
const lastOf = (column) => {
  for (let at = (column || []).length - 1; at >= 0; at--) if (column[at] !== null) return column[at];
  return null;
};
