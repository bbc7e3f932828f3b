"use strict";
// What the scripts of all pages share: the page's data, elements by their id, new elements, short numbers, and translated texts.
const unsoftPage = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const make = (tag, text, ...classes) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (classes.length) element.classList.add(...classes);
    return element;
  };
  // A text in the language of the page, with numbers in the places marked "#".
  const say = (text, ...values) => values.reduce((said, x) => said.replace("#", String(x)), data.texts[text] || text);
  const short = (x) => {
    if (x === null || x === undefined) return "–";
    if (Number.isInteger(x)) return String(x);
    if (x !== 0 && Math.abs(x) < 0.001) return x.toExponential(1);
    return Math.abs(x) < 1 ? x.toFixed(3) : String(Number(x.toPrecision(4)));
  };
  return { data, at, make, say, short };
})();
