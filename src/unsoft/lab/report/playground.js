// The playground: weights of a row of clones, curves against the logit, and a link that carries the state.
(() => {
  const { data, at, make, say } = unsoftPage;
  const { chip, drawn, lookOf, inTurns, legendEntry } = unsoftCharts;
  const play = data.play;
  const OWN = "your own";
  const short = (x) => {
    if (!Number.isFinite(x)) return "–";
    if (x === 0) return "0";
    return Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4 ? String(Number(x.toPrecision(4))) : x.toExponential(2);
  };
  const SLIDERS = [
    ["clones", "clones", 0, 200, 1, 50, "copies of the less relevant key"],
    ["similarity", "similarity of the clones", 0, 1, 0.01, 1, "1: exact copies"],
    ["relevance", "relevance of the unique key", 1, 100, 1, 20, "exp(logit), relative to one clone"],
    ["temperature", "temperature", 0.1, 5, 0.1, 1, "divides the logits"],
    ["t", "t", 0.1, 10, 0.1, 1, "how close keys must be to count as one"],
    ["slope", "β of the gate", 0, 20, 0.5, 1, "1 in Rosić 2026"],
    ["offset", "γ of the gate", -10, 10, 0.5, 0, "0 in Rosić 2026"],
  ];
  const values = {};
  const formulas = new Map(unsoftFormulas);
  const measured = new Map(Object.entries(play.curves)); // of mechanisms that are no function of the logits
  const labels = [...new Set([...data.looks.map((look) => look.label), ...formulas.keys()])].filter((label) => formulas.has(label) || measured.has(label));
  const chosen = new Set(play.shown);

  // Weights of one row
  const compute = () => {
    const clones = values.clones;
    const logits = [1 + Math.log(values.relevance), ...Array(clones).fill(1)].map((s) => s / values.temperature);
    // All clones are equally far apart, and the unique key is far from them: the solution of (Z + eps) mu = 1 is known.
    const near = values.similarity ** values.t;
    const muUnique = 1 / (1 + play.eps);
    const muClone = 1 / (1 + play.eps + (clones - 1) * near);
    const gate = (mu) => 1 / (1 + Math.exp(-(values.slope * mu + values.offset)));
    return { logits, muUnique, muClone, gateUnique: gate(muUnique), gateClone: gate(muClone) };
  };
  const rowOf = (label, weigh, setting) => {
    const weights = weigh(setting.logits);
    const unique = weights[0];
    const rest = weights.slice(1).reduce((a, b) => a + b, 0);
    const size = weights.slice(1).reduce((a, b) => a + Math.abs(b), 0);
    const share = (u, c) => (u + c === 0 ? 0 : u / (u + c));
    return {
      label, unique, each: weights.length > 1 ? weights[1] : NaN, rest, share: share(Math.abs(unique), size),
      gated: share(Math.abs(unique) * setting.gateUnique, size * setting.gateClone),
    };
  };
  const own = { weigh: null };
  const showWeights = () => {
    const setting = compute();
    const rows = [...formulas].filter(([label]) => chosen.has(label)).map(([label, weigh]) => rowOf(label, weigh, setting));
    const error = at("own-error");
    if (own.weigh) {
      const row = rowOf(OWN, own.weigh, setting);
      if (![row.unique, row.rest].every(Number.isFinite)) {
        error.textContent = say("the weights of this row are not finite numbers");
        error.hidden = false;
      }
      rows.push(row);
    }
    at("weights").tBodies[0].replaceChildren(
      ...rows.map((row) => {
        const line = make("tr");
        line.dataset.formula = row.label;
        const head = make("th", row.label);
        head.scope = "row";
        line.append(head);
        for (const field of ["unique", "each", "rest", "share", "gated"]) {
          const cell = make("td", undefined, "number");
          cell.dataset.field = field;
          cell.dataset.value = String(row[field]);
          cell.append(make("span", short(row[field])));
          if (field === "share" || field === "gated") {
            const bar = make("div", undefined, "bar");
            const fill = make("i");
            fill.style.width = `${100 * Math.min(1, Math.max(0, row[field]))}%`;
            bar.append(fill);
            cell.append(bar);
          }
          line.append(cell);
        }
        return line;
      }),
    );
    const gates = [setting.muUnique, setting.muClone, setting.gateUnique, setting.gateClone].map(short);
    at("gate-said").textContent = say("μ of the unique key #, of a clone #; gates # and #", ...gates);
  };

  // Weight of one key against its logit, the others being the same for everyone
  const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [640, 260, 40, 8, 34];
  const low = play.logits[0];
  const high = play.logits[play.logits.length - 1];
  const xOf = (s) => LEFT + ((s - low) / (high - low)) * (WIDTH - LEFT - 8);
  const yOf = (w) => TOP + ((1 - w) / 2) * (HEIGHT - TOP - BOTTOM);
  const curveOf = (label) => {
    const weigh = label === OWN ? own.weigh : formulas.get(label);
    const found = weigh ? play.logits.map((s) => weigh([s, ...play.others])[0]) : measured.get(label);
    const most = Math.max(...found.filter(Number.isFinite).map(Math.abs)) || 1;
    return found.map((w) => (Number.isFinite(w) ? w / most : NaN));
  };
  const showCurves = () => {
    const shown = labels.filter((label) => chosen.has(label));
    if (own.weigh) shown.push(OWN);
    const curves = new Map(shown.map((label) => [label, curveOf(label)]));
    const groups = [];
    for (const [label, curve] of curves) {
      const same = groups.find((group) => curves.get(group[0]).every((w, k) => Math.abs(w - curve[k]) < 0.01));
      if (same) same.push(label);
      else groups.push([label]);
    }
    const chart = at("curves");
    chart.replaceChildren();
    for (const w of [-1, -0.5, 0, 0.5, 1]) {
      const line = drawn("line", { class: w === 0 ? "zero" : "rule", x1: LEFT, x2: WIDTH - 8, y1: yOf(w), y2: yOf(w) });
      const text = drawn("text", { class: "tick", x: LEFT - 6, y: yOf(w) + 4, "text-anchor": "end" });
      text.textContent = String(w);
      chart.append(line, text);
    }
    for (let s = Math.ceil(low); s <= high; s += 2) {
      const text = drawn("text", { class: "tick", x: xOf(s), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" });
      text.textContent = String(s);
      chart.append(text);
    }
    const under = drawn("text", { class: "tick", x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, "text-anchor": "middle" });
    under.textContent = say("logit of one key, # others are N(0, 1)", play.others.length);
    chart.append(under);
    for (const group of groups) {
      group.forEach((label, place) => {
        let pen = "M";
        const path = curves.get(label).map((w, k) => {
          if (!Number.isFinite(w)) {
            pen = "M";
            return "";
          }
          const piece = `${pen}${xOf(play.logits[k]).toFixed(1)} ${yOf(w).toFixed(1)}`;
          pen = "L";
          return piece;
        });
        const dash = group.length > 1 ? inTurns(place, group.length) : lookOf(label).dash;
        const line = drawn("path", { d: path.join(""), stroke: lookOf(label).colour, "stroke-dasharray": dash[1] ? dash.join(" ") : "none", "data-label": label });
        if (label === OWN) line.setAttribute("stroke-width", 3);
        const title = drawn("title", {});
        title.textContent = group.length > 1 ? `${group.join(" = ")} (in turns)` : label;
        line.append(title);
        chart.append(line);
      });
    }
    at("curves-legend").replaceChildren(...groups.map(legendEntry));
  };

  // The state, in the address and in a link
  const stateOf = () => {
    const state = new URLSearchParams();
    for (const [name] of SLIDERS) state.append(name, String(values[name]));
    for (const label of labels.filter((one) => chosen.has(one))) state.append("show", label);
    state.append("own", at("own").value);
    return `#playground?${state}`;
  };
  const show = (changed = true) => {
    showWeights();
    showCurves();
    at("play-link").href = stateOf();
    if (changed) history.replaceState(null, "", stateOf());
  };

  // The magnitude gate is folded away: its sliders and its column are shown together.
  const gate = make("details");
  gate.id = "gate";
  const gateHelp = say("Gate of Rosić 2026 on the weights: sigmoid(β μ + γ) with (Z + ε) μ = 1, ε = #", play.eps);
  gate.append(make("summary", say("Magnitude gate")), make("p", gateHelp, "small", "quiet"));
  gate.addEventListener("toggle", () => {
    at("weights").classList.toggle("gated", gate.open);
    at("gate-said").hidden = !gate.open;
  });
  at("gate-said").hidden = true;
  const GATE = new Set(["t", "slope", "offset"]);
  const inputs = new Map();
  for (const [name, title, least, most, step, first, help] of SLIDERS) {
    values[name] = first;
    const line = make("div", undefined, "slider");
    const label = make("label", say(title));
    label.htmlFor = `slider-${name}`;
    const output = make("output", String(first));
    output.htmlFor = `slider-${name}`;
    const input = make("input");
    Object.assign(input, { type: "range", id: `slider-${name}`, min: least, max: most, step, value: first });
    const take = () => {
      values[name] = Number(input.value);
      output.textContent = input.value;
    };
    input.addEventListener("input", () => {
      take();
      show();
    });
    inputs.set(name, { input, take });
    line.append(label, output, input, make("small", say(help)));
    (GATE.has(name) ? gate : at("sliders")).append(line);
  }
  at("sliders").append(gate);
  at("sliders").addEventListener("submit", (event) => event.preventDefault());
  const drawChips = () => {
    at("play-chips").querySelectorAll("button").forEach((button) => button.remove());
    for (const label of labels) {
      at("play-chips").append(
        chip(label, chosen.has(label), (now) => {
          if (now) chosen.add(label);
          else chosen.delete(label);
          show();
        }),
      );
    }
  };
  // Logits of 24 random tokens, the same on every page: a linear congruential generator, summed to be nearly normal.
  let seed = 7;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const normal = () => 2 * Array.from({ length: 3 }, random).reduce((a, b) => a + b, -1.5);
  const LOGITS = Array.from({ length: 24 }, () => Array.from({ length: 24 }, normal));
  const readOwn = (changed = true) => {
    const error = at("own-error");
    error.hidden = true;
    own.weigh = null;
    if (at("own").value.trim()) {
      try {
        own.weigh = unsoftFormula.read(at("own").value);
        error.textContent = own.weigh.problem;
        error.hidden = !own.weigh.problem;
      } catch (problem) {
        error.textContent = problem.message;
        error.hidden = false;
      }
    }
    at("own-properties").textContent = own.weigh ? propertiesOf(own.weigh) : "";
    const maps = own.weigh ? [{ label: say("your own"), rows: LOGITS.map((row, i) => own.weigh(row.slice(0, i + 1), { i })) }] : [];
    window.unsoftMaps(at("own-map"), maps);
    show(changed);
  };
  const propertiesOf = (weigh) => {
    const row = weigh(play.others);
    const [sum, size] = [row.reduce((a, b) => a + b, 0), row.reduce((a, b) => a + Math.abs(b), 0)];
    const negative = row.reduce((a, b) => a + Math.max(0, -b), 0) / (size || 1);
    const zeros = row.filter((w) => w === 0).length;
    const numbers = [row.length, short(sum), short(size), Math.round(100 * negative), zeros];
    return say("On # keys N(0, 1): weights sum to #, sizes to #; # % negative; # exact zeros.", ...numbers);
  };
  at("own").addEventListener("input", () => readOwn());
  for (const label of Object.keys(play.texts)) at("preset").append(new Option(label, label));
  at("preset").addEventListener("change", () => {
    const text = play.texts[at("preset").value];
    if (text === undefined) return;
    at("own").value = text;
    readOwn();
  });
  const quoted = (text) => `"${text.replace(/[\\"]/g, "\\$&")}"`;
  at("copy-python").addEventListener("click", () => {
    const { parts, params } = unsoftFormula.split(at("own").value);
    const given = [...parts].map(([name, text]) => `${name}=${quoted(text)}`);
    if (params.size) given.push(`params={${[...params].map(([name, x]) => `${quoted(name)}: ${x}`).join(", ")}}`);
    window.unsoftCopy(at("copy-python"), `mine = unsoft.Formula(${given.join(", ")}, name="mine")`);
  });
  at("copy-cli").addEventListener("click", () => {
    const text = `name=mine; ${at("own").value}`.replace(/'/g, "'\\''");
    window.unsoftCopy(at("copy-cli"), `unsoft compare softmax '${text}' --quick`);
  });
  const readState = () => {
    const [place, text] = window.location.hash.split(/\?(.*)/s);
    const state = new URLSearchParams(place === "#playground" ? text : "");
    for (const [name, { input, take }] of inputs) {
      if (state.has(name) && Number.isFinite(Number(state.get(name)))) input.value = state.get(name); // the slider keeps it in its range
      take();
    }
    if (state.has("show") || state.has("own")) {
      chosen.clear();
      for (const label of state.getAll("show")) if (labels.includes(label)) chosen.add(label);
    }
    if (state.has("own")) at("own").value = state.get("own");
    drawChips();
    readOwn(false);
    if (text) at("playground").scrollIntoView();
  };
  window.addEventListener("hashchange", readState);
  readState();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
