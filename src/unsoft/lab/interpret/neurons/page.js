// Planes of neurons and the chosen neuron. Texts go through textContent, colours through classes.
(() => {
  const { data, at, make, short } = unsoftPage;
  const draw = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const columns = new Map(data.columns.map((column, place) => [column.name, { ...column, place: place + 1 }]));
  const neurons = new Map(data.neurons.map((row) => [row[0], row]));
  const figure = (row, name) => row[columns.get(name).place];
  let chosen = data.first;

  // Round numbers that reach over what is drawn
  const ticks = (low, high, about) => {
    const rough = (high - low) / about || 1;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => one >= rough * 0.999);
    const result = [];
    for (let k = Math.floor(low / step + 1e-9); k <= Math.ceil(high / step - 1e-9); k += 1) result.push(Number((k * step).toPrecision(12)));
    return result;
  };
  const axes = (width, height, xs, ys, labels) => {
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${labels[0]} and ${labels[1]}` });
    const [left, right, top, bottom] = [56, width - 12, 12, height - 44];
    const across = ticks(Math.min(...xs), Math.max(...xs), 5);
    const up = ticks(Math.min(...ys), Math.max(...ys), 5);
    const x = (value) => left + ((value - across[0]) / (across[across.length - 1] - across[0])) * (right - left);
    const y = (value) => bottom - ((value - up[0]) / (up[up.length - 1] - up[0])) * (bottom - top);
    for (const tick of up) {
      svg.append(draw("line", { class: "rule", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      svg.append(draw("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
    }
    for (const tick of across) svg.append(draw("text", { class: "tick", x: x(tick), y: bottom + 16, "text-anchor": "middle" }, String(tick)));
    svg.append(draw("text", { class: "axis", x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, labels[0]));
    svg.append(draw("text", { class: "axis", x: 12, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + bottom) / 2})` }, labels[1]));
    return { svg, x, y, left, right, top, bottom, lowest: up[0], highest: up[up.length - 1] };
  };

  // The plane
  const order = { candidate: 1, passes: 2, frequency: 3, entropy: 4 };
  const dots = new Map();
  const told = at("told");
  const showPlane = () => {
    const [across, up] = at("plane").value.split(" ").map((name) => columns.get(name));
    at("plane-help").textContent = `Across: ${across.help}. Up: ${up.help}.`;
    const rows = [...neurons.values()].sort((a, b) => (order[data.roles[a[0]]] || 0) - (order[data.roles[b[0]]] || 0));
    const values = rows.map((row) => row[up.place]);
    // Shares of very small effects can lie far below zero; the plane ends at -1 and says so.
    const share = up.name.endsWith("_share");
    const clipped = share ? values.map((value) => Math.max(value, -1)) : values;
    const [wide, tall] = at("plane-frame").clientWidth < 500 ? [400, 360] : [640, 460]; // so that words stay readable
    const plane = axes(wide, tall, rows.map((row) => row[across.place]), [...clipped, 0], [across.title, up.title]);
    const shaded = data.bands[up.name];
    if (shaded) {
      const [low, high] = shaded.map((value) => Math.min(Math.max(value, plane.lowest), plane.highest));
      plane.svg.append(draw("rect", { class: "shade", x: plane.left, width: plane.right - plane.left, y: plane.y(high), height: plane.y(low) - plane.y(high) }));
    }
    dots.clear();
    rows.forEach((row, place) => {
      const role = data.roles[row[0]];
      const dot = draw("circle", { class: `mark ${role || ""}`, cx: plane.x(row[across.place]).toFixed(1), cy: plane.y(clipped[place]).toFixed(1), r: role && role !== "candidate" ? 6 : 4 });
      dot.dataset.key = row[0];
      dot.append(draw("title", {}, `neuron ${row[0]}${role ? ` (${role})` : ""}: ${across.title} ${short(row[across.place])}, ${up.title} ${short(row[up.place])}`));
      dots.set(row[0], dot);
      plane.svg.append(dot);
    });
    at("plane-frame").replaceChildren(plane.svg);
    mark();
  };
  const mark = () => {
    for (const [number, dot] of dots) dot.classList.toggle("now", number === chosen);
    const dot = dots.get(chosen);
    if (dot) dot.parentNode.append(dot);
  };
  at("plane").addEventListener("change", showPlane);
  at("plane-frame").addEventListener("pointerover", (event) => {
    const dot = event.target.closest("circle");
    if (dot) told.textContent = dot.querySelector("title").textContent;
  });
  const choose = (number) => {
    if (!neurons.has(number)) return;
    chosen = number;
    mark();
    showNeuron();
  };
  document.addEventListener("click", (event) => {
    const target = event.target.closest("circle[data-key], tr[data-key]");
    if (!target) return;
    choose(Number(target.dataset.key));
    if (target.tagName === "TR") at("plane-title").scrollIntoView();
  });

  // The list, for keyboards: neurons with details first
  const list = at("neuron");
  const listed = [...neurons.keys()].sort((a, b) => Boolean(data.details[b]) - Boolean(data.details[a]) || a - b);
  for (const number of listed) {
    const option = make("option", `${number}${data.roles[number] ? ` (${data.roles[number]})` : ""}`);
    option.value = number;
    list.append(option);
  }
  list.addEventListener("change", () => choose(Number(list.value)));

  const lines = (frame, xs, series, labels) => {
    const chart = axes(360, 220, xs, [...series.flatMap((one) => one.values), 0], labels);
    for (const { values, kind } of series) {
      chart.svg.append(draw("polyline", { class: `line ${kind}`, points: xs.map((x, place) => `${chart.x(x).toFixed(1)},${chart.y(values[place]).toFixed(1)}`).join(" ") }));
    }
    xs.forEach((x, place) => {
      const dot = draw("circle", { class: "dot", cx: chart.x(x), cy: chart.y(series[0].values[place]), r: 3 });
      dot.append(draw("title", {}, `${labels[0]} ${short(x)}: ${short(series[0].values[place])}, dashes ${short(series[1].values[place])}`));
      chart.svg.append(dot);
    });
    frame.replaceChildren(chart.svg);
  };
  const showNeuron = () => {
    const row = neurons.get(chosen);
    const role = data.roles[chosen];
    const detail = data.details[chosen];
    list.value = String(chosen);
    at("chosen-title").textContent = `Neuron ${chosen}${role ? `: ${role === "passes" ? "passes a test without such weights" : role}` : ""}`;
    const intervals = data.intervals[chosen] || {};
    at("numbers").replaceChildren(
      ...data.columns.map((column, place) => {
        const pair = make("div");
        pair.title = column.help;
        const ends = intervals[column.name];
        pair.append(make("dt", column.title), make("dd", `${short(row[place + 1])}${ends ? ` [${short(ends[0])}, ${short(ends[1])}]` : ""}`));
        return pair;
      }),
    );
    const nothing = () => make("p", "Available only for the top neurons of each list.", "quiet", "small");
    if (!detail) {
      at("curve").replaceChildren(nothing());
      at("tokens").replaceChildren();
      return;
    }
    const doses = detail.curve.map((point) => point.dose);
    lines(at("curve"), doses, [
      { values: detail.curve.map((point) => point.entropy), kind: "" },
      { values: detail.curve.map((point) => point.entropy_frozen), kind: "dashed" },
    ], ["part removed", "Δ H in nats"]);
    at("tokens").replaceChildren(
      ...detail.tokens.map((token) => {
        const line = make("tr");
        const words = make("td", token.before, "word");
        words.append(make("b", token.token), make("span", token.next, "next"));
        line.append(make("td", short(token.activation)), words);
        return line;
      }),
    );
  };
  at("all-numbers").open = window.matchMedia("(min-width: 1000px)").matches;
  showPlane();
  showNeuron();
})();
