"use strict";
// What the scripts of all pages share: the page's data, elements by their id, new elements, short numbers.
const unsoftPage = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const make = (tag, text, ...classes) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (classes.length) element.classList.add(...classes);
    return element;
  };
  const short = (x) => {
    if (x === null || x === undefined) return "–";
    if (Number.isInteger(x)) return String(x);
    if (x !== 0 && Math.abs(x) < 0.001) return x.toExponential(1);
    return Math.abs(x) < 1 ? x.toFixed(3) : String(Number(x.toPrecision(4)));
  };
  return { data, at, make, short };
})();
