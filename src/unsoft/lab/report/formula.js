"use strict";
// Formulas typed by the reader: the grammar of unsoft.formula.parser, read into a tree of functions. Nothing is ever executed as code.
// unsoftOperations, the table of operations, is written by unsoft.formula.javascript.
const unsoftFormula = (() => {
  const MOST = { length: 2000, depth: 64, nodes: 2000, exponent: 64 };
  const { functions, table } = unsoftOperations;
  const arity = (name) => table.get(name).arity;
  const TOKEN = /([ \t\r\n]+)|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|([A-Za-z_][A-Za-z0-9_]*)|(\*\*|<=|>=|==|!=|[-+*/(),<>])/y;
  const HINTS = new Map([["^", "powers are written with **"], ["=", "equality is written with =="], ["|", "the absolute value is written abs(s)"]]);
  const COMPARE = new Set(["<", "<=", ">", ">=", "==", "!="]);

  const parse = (source, names, part) => {
    const wrong = (problem, place) => new Error(`${part}: ${problem}\n    ${source}\n    ${" ".repeat(place)}^`);
    if (source.length > MOST.length) throw new Error(`${part}: the text has ${source.length} characters; at most ${MOST.length} are allowed`);
    const tokens = [];
    TOKEN.lastIndex = 0;
    while (TOKEN.lastIndex < source.length) {
      const place = TOKEN.lastIndex;
      const match = TOKEN.exec(source);
      if (match === null) {
        const hint = HINTS.get(source[place]);
        throw wrong(`unexpected '${source[place]}'${hint ? `: ${hint}` : ""}`, place);
      }
      if (match[1] === undefined) {
        const kind = match[2] !== undefined ? "number" : match[3] !== undefined ? "name" : "mark";
        tokens.push({ kind, text: match[0], place });
      }
    }
    tokens.push({ kind: "end", text: "", place: source.length });
    let next = 0;
    let depth = 0;
    let nodes = 0;
    const peek = () => tokens[next];
    const take = () => tokens[next++];
    const found = (token) => (token.text ? `'${token.text}'` : "the end");
    const count = (token) => {
      nodes += 1;
      if (nodes > MOST.nodes) throw wrong(`the formula has more than ${MOST.nodes} parts`, token.place);
    };
    // A node is {at: environment -> number, constant: number or null}; ofLogit if it depends on s, grows if exponentially.
    const GROWING = new Set(["exp", "expm1", "expdiff", "sinh", "cosh"]);
    const flags = (name, ...args) => ({
      ofLogit: args.some((x) => x.ofLogit),
      grows: args.some((x) => x.grows) || (GROWING.has(name) && args.some((x) => x.ofLogit)) || (name === "**" && args[1].ofLogit),
    });
    const one = (token, name, a) => {
      count(token);
      const f = table.get(name).of;
      // With "floor", exponentials do not underflow.
      const at = name === "exp" ? (e) => f(e.has("floor") ? Math.max(a.at(e), -200) : a.at(e)) : (e) => f(a.at(e));
      return { at, constant: a.constant === null ? null : f(a.constant), ...flags(name, a) };
    };
    const two = (token, name, a, b) => {
      count(token);
      const f = table.get(name).of;
      if (name === "**" && b.constant !== null && Math.abs(b.constant) > MOST.exponent) {
        throw wrong(`the exponent ${b.constant} is too large; at most ${MOST.exponent} is allowed`, token.place);
      }
      return { at: (e) => f(a.at(e), b.at(e)), constant: a.constant === null || b.constant === null ? null : f(a.constant, b.constant), ...flags(name, a, b) };
    };
    const noComparison = () => {
      if (COMPARE.has(peek().text)) throw wrong("one comparison may stand in where(condition, a, b), nowhere else", peek().place);
    };
    const expect = (mark, why) => {
      if (peek().text !== mark) throw wrong(`expected '${mark}' ${why}, found ${found(peek())}`, peek().place);
      take();
    };
    const value = () => {
      let left = term();
      while (peek().text === "+" || peek().text === "-") {
        const token = take();
        left = two(token, token.text, left, term());
      }
      return left;
    };
    const term = () => {
      let left = factor();
      while (peek().text === "*" || peek().text === "/") {
        const token = take();
        left = two(token, token.text, left, factor());
      }
      return left;
    };
    const factor = () => {
      depth += 1;
      if (depth > MOST.depth) throw wrong(`the formula is nested more than ${MOST.depth} levels deep`, peek().place);
      let result;
      if (peek().text === "+" || peek().text === "-") {
        const token = take();
        const inner = factor();
        result = token.text === "+" ? inner : one(token, "neg", inner);
      } else {
        result = atom();
        if (peek().text === "**") {
          const token = take();
          result = two(token, "**", result, factor());
        }
      }
      depth -= 1;
      return result;
    };
    const atom = () => {
      const token = take();
      if (token.kind === "number") {
        const number = Number(token.text);
        if (!Number.isFinite(number)) throw wrong("the number is not finite in double precision", token.place);
        return { at: () => number, constant: number };
      }
      if (token.kind === "name") return peek().text === "(" ? call(token) : symbol(token);
      if (token.text === "(") {
        const inner = value();
        noComparison();
        expect(")", "to close the bracket");
        return inner;
      }
      throw wrong(`expected a number, a symbol, a function or '(', found ${found(token)}`, token.place);
    };
    const symbol = (token) => {
      if (names.has(token.text)) return { at: (e) => e.get(token.text), constant: null, ofLogit: token.text === "s" };
      if (functions.has(token.text)) throw wrong(`${token.text} is a function: write ${token.text}(...)`, token.place);
      throw wrong(`unknown name '${token.text}'`, token.place);
    };
    const call = (token) => {
      if (!functions.has(token.text)) {
        if (names.has(token.text)) throw wrong(`${token.text} is not a function; a product is written ${token.text}*(...)`, token.place);
        throw wrong(`unknown function '${token.text}'`, token.place);
      }
      take();
      let condition = null;
      const args = [];
      if (token.text === "where") {
        const left = value();
        if (!COMPARE.has(peek().text)) throw wrong("the first argument of where must be a comparison, such as s > 0", peek().place);
        const mark = take();
        condition = two(mark, mark.text, left, value());
      } else {
        args.push(value());
      }
      noComparison();
      while (peek().text === ",") {
        take();
        args.push(value());
        noComparison();
      }
      expect(")", `to close ${token.text}(`);
      const many = token.text === "max" || token.text === "min";
      const given = args.length + (condition ? 1 : 0);
      if (given !== arity(token.text) && !(many && given > 2)) {
        throw wrong(`${token.text} takes ${many ? "at least 2" : arity(token.text)} argument(s), not ${given}`, token.place);
      }
      if (condition) {
        count(token);
        return { at: (e) => (condition.at(e) ? args[0].at(e) : args[1].at(e)), constant: null, ...flags("where", condition, ...args) };
      }
      if (!many && args.length > 2) {
        count(token);
        const f = table.get(token.text).of;
        return { at: (e) => f(...args.map((x) => x.at(e))), constant: null, ...flags(token.text, ...args) };
      }
      if (!many) return args.length === 1 ? one(token, token.text, args[0]) : two(token, token.text, args[0], args[1]);
      return args.slice(1).reduce((result, arg) => two(token, token.text, result, arg), args[0]);
    };
    if (peek().kind === "end") throw wrong("the formula is empty", 0);
    const result = value();
    if (peek().kind !== "end") {
      noComparison();
      throw wrong(`unexpected ${found(peek())}`, peek().place);
    }
    return result;
  };

  const PARTS = ["weight", "mass", "peak", "norm", "offset_mass"];
  // "weight=...; mass=...; peak=...; tau=2", as the command line reads it; a text without "=" is the weight.
  const split = (text) => {
    const parts = new Map();
    const params = new Map();
    for (const piece of text.split(";").filter((x) => x.trim())) {
      const match = /^\s*([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)\s*([^]*)$/.exec(piece);
      const [name, content] = match ? [match[1], match[2].trim()] : ["weight", piece.trim()];
      if (parts.has(name) || params.has(name)) throw new Error(`'${name}' is given twice`);
      if (PARTS.includes(name)) parts.set(name, content);
      else if (name !== "name") {
        if (content === "" || !Number.isFinite(Number(content))) throw new Error(`'${name}' is neither a part (${PARTS.join(", ")}) nor a parameter with a number`);
        if ("smnijz".includes(name) || functions.has(name)) throw new Error(`a parameter cannot be called '${name}'`);
        params.set(name, Number(content));
      }
    }
    return { parts, params };
  };
  const read = (text) => {
    const { parts, params } = split(text);
    if (!parts.has("weight")) throw new Error("a formula needs at least 'weight=...'");
    if (parts.has("peak") && !parts.has("mass")) throw new Error("peak: a peak needs a mass: without a normaliser the shift by m cannot cancel");
    if (!parts.has("mass") && (parts.has("norm") || parts.has("offset_mass"))) throw new Error("norm and offset_mass act on the summed mass, but no mass is given");
    const common = ["n", "i", ...params.keys()];
    const peak = parts.has("peak") ? ["m"] : [];
    const allowed = {
      peak: ["s", "j", ...common], weight: ["s", "j", ...peak, ...common], mass: ["s", "j", ...peak, ...common],
      offset_mass: [...peak, ...common], norm: ["z", ...common],
    };
    const run = new Map();
    let grows = false;
    for (const [name, content] of parts) {
      const source = name === "norm" && functions.has(content) && arity(content) === 1 ? `${content}(z)` : content;
      const node = parse(source, new Set(allowed[name]), name);
      run.set(name, node.at);
      if (name === "weight" || name === "mass") grows ||= Boolean(node.grows);
    }
    const row = (logits, shift = 0) => {
      const base = new Map([...params, ["n", logits.length], ["i", logits.length - 1]]);
      const at = (s, j) => new Map([...base, ["s", s], ["j", j]]);
      if (run.has("peak")) base.set("m", shift + logits.reduce((top, s, j) => Math.max(top, run.get("peak")(at(s, j))), -Infinity));
      const weights = logits.map((s, j) => run.get("weight")(at(s, j)));
      if (!run.has("mass")) return weights;
      let total = logits.reduce((sum, s, j) => sum + run.get("mass")(at(s, j)), 0);
      if (run.has("offset_mass")) total += run.get("offset_mass")(base);
      if (run.has("norm")) total = run.get("norm")(new Map([...base, ["z", total]]));
      return weights.map((w) => (total === 0 ? 0 : w / total));
    };
    if (run.has("peak")) {
      const [a, b] = [row([1, -0.5, 2], 0), row([1, -0.5, 2], 0.37)];
      if (a.some((x, k) => Math.abs(x - b[k]) > 1e-6 * (1 + Math.abs(x)))) throw new Error("the row peak m does not cancel: it must only keep exp in range");
    }
    const weigh = (logits) => row(logits);
    weigh.problem = overflow(run, params, grows);
    return weigh;
  };

  // What unsoft.formula.invariance refuses: a normaliser that overflows or vanishes at large logits. "" if nothing does.
  const overflow = (run, params, grows) => {
    const at = (s, more = []) => new Map([...params, ["n", 2], ["i", 1], ["j", 0], ["s", s], ...more]);
    const total = (e) => run.get("mass")(e) + (run.has("offset_mass") ? run.get("offset_mass")(e) : 0);
    if (!run.has("peak")) {
      for (const s of grows && run.has("mass") ? [1e5, -1e5] : []) {
        const lost = total(at(s)) === 0 && total(at(s, [["floor", 1]])) !== 0;
        if (lost || Math.abs(total(at(s))) === Infinity) {
          return `mass ${lost ? "vanishes" : "overflows"} at the logit ${s}: write exp(... - m) in weight and mass, and give peak=..., the largest exponent`;
        }
      }
      return "";
    }
    for (const s of [-1e4, 0.5, 1e4]) {
      for (const other of [-1e4, 0.5, 1e4]) {
        const m = Math.max(run.get("peak")(at(s)), run.get("peak")(at(other)));
        for (const name of ["weight", "mass", "offset_mass"]) {
          if (run.has(name) && !Number.isNaN(m) && !Number.isFinite(run.get(name)(at(s, [["m", m]])))) {
            return `${name} overflows in a row of logits ${s} and ${other}: the peak must be at least as large as every exponent`;
          }
        }
      }
    }
    return "";
  };
  return { read, split };
})();
