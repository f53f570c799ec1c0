// The colour of a token's number: the same rule as on a terminal (columns.py), with the palette that the server sends.

import { element, shown } from "./elements.js";

const STRONGEST = 0.55; // of a colour over the paper: text stays readable on it (WCAG AA) in dark and light

const css = ([red, green, blue], strength) => `rgb(${red} ${green} ${blue} / ${(STRONGEST * strength).toFixed(3)})`;

/**
 * @param {{scale: string, largest: number}} kind
 * @param {number | string | null} value infinities are text
 * @param {Object} hues
 * @returns {string} a CSS colour, "" for none
 */
export function colourOf(kind, value, hues) {
  if (value === null || value === undefined) return "";
  if (kind.scale === "category") return css(hues.categories[value % hues.categories.length], 0.8);
  if (kind.scale === "flag") return value ? css(hues.flag, 1) : "";
  const number = value === "Infinity" ? Infinity : value === "-Infinity" ? -Infinity : value;
  const strength = Math.min(1, Math.abs(number) / kind.largest);
  if (!(strength > 0)) return "";
  const hue = kind.scale === "share" || kind.scale === "amount" ? "amount" : number > 0 ? "positive" : "negative";
  return css(hues[hue], strength);
}

/** What the colours of a column mean. */
export function legend(kind, hues) {
  if (!kind) return [];
  const bar = element("i");
  const ends = { share: ["0", "1"], amount: ["0", "≥ " + shown(kind.largest)], signed: ["≤ −" + shown(kind.largest), "≥ " + shown(kind.largest)] }[kind.scale];
  if (kind.scale === "signed") bar.style.background = `linear-gradient(90deg, ${css(hues.negative, 1)}, transparent, ${css(hues.positive, 1)})`;
  else if (kind.scale === "flag") bar.style.background = css(hues.flag, 1);
  else if (kind.scale === "category") bar.style.background = `linear-gradient(90deg, ${hues.categories.map((hue) => css(hue, 0.8)).join(", ")})`;
  else bar.style.background = `linear-gradient(90deg, transparent, ${css(hues.amount, 1)})`;
  return [...(ends ? [ends[0], bar, ends[1]] : [bar]), element("span", { class: "faint" }, kind.meaning)];
}
