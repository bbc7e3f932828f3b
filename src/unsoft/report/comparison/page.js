(() => {
  const { data, at, make, chip } = unsoftCharts;
  const short = (x) => {
    if (!Number.isFinite(x)) return "–";
    if (x === 0) return "0";
    return Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4 ? String(Number(x.toPrecision(4))) : x.toExponential(2);
  };

  // Heat maps
  const drawMaps = () => {
    document.querySelectorAll(".maps").forEach((place, k) => drawInto(place, data.maps[k]));
  };
  const drawInto = (place, maps) => {
    place.replaceChildren();
    for (const { label, rows } of maps) {
      const figure = make("figure");
      const canvas = make("canvas");
      canvas.width = canvas.height = rows.length;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `weights of ${label}`);
      const context = canvas.getContext("2d");
      rows.forEach((row, i) => {
        const most = Math.max(...row.map(Math.abs)) || 1;
        row.slice(0, i + 1).forEach((x, j) => {
          context.globalAlpha = Math.abs(x) / most;
          context.fillStyle = x < 0 ? "#d55e00" : "#0072b2";
          context.fillRect(j, i, 1, 1);
        });
      });
      figure.append(canvas, make("figcaption", label));
      place.append(figure);
    }
  };
  drawMaps();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMaps);

  // Playground
  const SLIDERS = [
    ["clones", "clones", 0, 200, 1, 50, "how many copies of the mediocre key"],
    ["similarity", "similarity of the clones", 0, 1, 0.01, 1, "Z between two clones at t = 1"],
    ["relevance", "relevance of the unique key", 1, 100, 1, 20, "exp of its logit, over that of a clone"],
    ["temperature", "temperature", 0.1, 5, 0.1, 1, "divides the logits"],
    ["t", "t", 0.1, 10, 0.1, 1, "how close keys must be to count as one"],
    ["slope", "β of the gate", 0, 20, 0.5, 1, "1 in Rosić 2026"],
    ["offset", "γ of the gate", -10, 10, 0.5, 0, "0 in Rosić 2026"],
  ];
  const EPS = 0.01;
  const values = {};
  const formulas = new Map(unsoftFormulas);
  const chosen = new Set(data.played);
  const compute = () => {
    const clones = values.clones;
    const logits = [1 + Math.log(values.relevance), ...Array(clones).fill(1)].map((s) => s / values.temperature);
    // All clones are equally far apart, and the unique key is far from them: the solution of (Z + eps) mu = 1 is known.
    const near = values.similarity ** values.t;
    const muUnique = 1 / (1 + EPS);
    const muClone = 1 / (1 + EPS + (clones - 1) * near);
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
      const row = rowOf("your own", own.weigh, setting);
      if (![row.unique, row.rest].every(Number.isFinite)) {
        error.textContent = "the weights of this row are not finite numbers";
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
    at("gate-said").textContent = `μ of the unique key ${short(setting.muUnique)}, of a clone ${short(setting.muClone)}; gates ${short(setting.gateUnique)} and ${short(setting.gateClone)}`;
  };
  for (const [name, title, low, high, step, first, help] of SLIDERS) {
    values[name] = first;
    const line = make("div", undefined, "slider");
    const label = make("label", title);
    label.htmlFor = `slider-${name}`;
    const output = make("output", String(first));
    output.htmlFor = `slider-${name}`;
    const input = make("input");
    Object.assign(input, { type: "range", id: `slider-${name}`, min: low, max: high, step, value: first });
    input.addEventListener("input", () => {
      values[name] = Number(input.value);
      output.textContent = input.value;
      showWeights();
    });
    line.append(label, output, input, make("small", help));
    at("sliders").append(line);
  }
  at("sliders").addEventListener("submit", (event) => event.preventDefault());
  for (const label of formulas.keys()) {
    at("play-chips").append(
      chip(label, chosen.has(label), (now) => {
        if (now) chosen.add(label);
        else chosen.delete(label);
        showWeights();
      }),
    );
  }
  const readOwn = () => {
    const error = at("own-error");
    error.hidden = true;
    own.weigh = null;
    if (at("own").value.trim()) {
      try {
        own.weigh = unsoftFormula.read(at("own").value);
      } catch (problem) {
        error.textContent = problem.message;
        error.hidden = false;
      }
    }
    showWeights();
  };
  at("own").addEventListener("input", readOwn);
  readOwn();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
