// Chips, charts and their legends, for every page that has them: the page holds #chips, #tip and places of class "vega".
const unsoftCharts = (() => {
  const { data, at, make, say } = unsoftPage;
  // A piece of a mechanism's line with its mark.
  const MARKS = {
    circle: "M13 1a3 3 0 1 0 0 6a3 3 0 1 0 0 -6z", square: "M10 1h6v6h-6z", diamond: "M13 .2l3.6 3.8l-3.6 3.8l-3.6 -3.8z",
    "triangle-up": "M13 .6l3.6 6.4h-7.2z", "triangle-down": "M13 7.4l3.6 -6.4h-7.2z", "triangle-right": "M16.6 4l-6 -3.5v7z",
    "triangle-left": "M9.4 4l6 -3.5v7z", cross: "M12 .5h2v2.5h2.5v2h-2.5v2.5h-2v-2.5h-2.5v-2h2.5z",
  };
  const PLAIN = { colour: "currentColor", dash: [1, 0], mark: "circle" };
  const lookOf = (label) => data.looks.find((one) => one.label === label) || (data.more || []).find((one) => one.label === label) || PLAIN;
  const drawn = (tag, values) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    return element;
  };
  const swatch = (label) => {
    const look = lookOf(label);
    const svg = drawn("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" });
    const dash = look.dash[1] ? look.dash.join(" ") : "none";
    svg.append(
      drawn("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: look.colour, "stroke-width": 2, "stroke-dasharray": dash }),
      drawn("path", { d: MARKS[look.mark], stroke: look.colour, "stroke-width": 1.4 }),
    );
    return svg;
  };
  const chip = (label, pressed, change) => {
    const button = make("button", undefined, "chip");
    button.type = "button";
    button.append(swatch(label), make("span", label));
    button.setAttribute("aria-pressed", String(pressed));
    button.addEventListener("click", () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(now));
      change(now);
    });
    return button;
  };
  const shown = new Set(data.shown);
  const listOfShown = () => data.looks.map((one) => one.label).filter((label) => shown.has(label));
  const signals = { shown: listOfShown() };
  const views = new Map();
  const listeners = [];
  const onShown = (listener) => {
    listeners.push(listener);
    listener(shown);
  };
  // Lines that coincide are seen in turns: each has a dash where the others have gaps (unsoft.lab.report.look does the same).
  const TURN = 9;
  const inTurns = (place, count) => [0, place * TURN, TURN, (count - 1 - place) * TURN];
  const sameNow = (about) => {
    const panel = about.choose.map((name) => `${name}=${signals[name]}`).join(",");
    return (about.same[panel] || []).map((group) => group.filter((label) => shown.has(label))).filter((group) => group.length > 1);
  };
  const dashesOf = (about) => {
    const same = sameNow(about);
    return about.order.map((label) => {
      const group = same.find((one) => one.includes(label));
      return group ? inTurns(group.indexOf(label), group.length) : lookOf(label).dash;
    });
  };
  const legendEntry = (group) => {
    const entry = make("li");
    for (const name of group) {
      if (entry.childNodes.length) entry.append(make("b", "="));
      entry.append(swatch(name), make("span", name));
    }
    if (group.length > 1) entry.title = say("these lines coincide; each colour is seen in turn");
    return entry;
  };
  // Lines are labelled at their ends where there is room, else by a legend above.
  const ROOM = 440;
  const labelled = (place) => place.clientWidth >= ROOM;
  const width = (text) => 30 + 6.6 * text.length;
  const endsRoom = (about, place) => {
    const groups = Object.values(about.same).flat().map((group) => `___${group.slice(0, 2).join(" = ")}`);
    return Math.min(230, 0.38 * place.clientWidth, Math.max(...[...about.mechanisms, ...groups].map(width)) + 6);
  };
  const labelEnds = (place, view) => {
    place.querySelectorAll(".end").forEach((label) => label.remove());
    const { spec } = data.figures[place.dataset.figure];
    const about = spec.usermeta;
    if (!about || about.bars || !labelled(place)) return;
    const [left, top] = view.origin();
    const [x, y] = [view.scale("x"), view.scale("y")];
    const every = Object.values(spec.datasets).flat(); // lines, and dots of mechanisms without one
    const rows = every.filter((row) => row.mechanism !== undefined && about.choose.every((name) => row[name] === signals[name]));
    const same = sameNow(about);
    const ends = [];
    for (const label of about.mechanisms.filter((one) => shown.has(one))) {
      const group = same.find((one) => one.includes(label)) || [label];
      if (group[0] !== label) continue;
      const inside = (row) => row.mechanism === label && x(row[about.x]) <= view.width() + 1 && Number.isFinite(y(row[about.y]));
      const last = rows.filter(inside).sort((a, b) => a[about.x] - b[about.x]).pop();
      if (last) ends.push({ group, at: Math.min(view.height(), Math.max(0, y(last[about.y]))) });
    }
    ends.sort((a, b) => a.at - b.at);
    const GAP = 15;
    ends.forEach((end, k) => (end.at = k ? Math.max(end.at, ends[k - 1].at + GAP) : end.at));
    for (let k = ends.length - 1, most = view.height() + 12; k >= 0; k -= 1, most -= GAP) ends[k].at = Math.min(ends[k].at, most);
    for (const { group, at: height } of ends) {
      const label = make("span", undefined, "end");
      group.slice(0, 2).forEach((name) => label.append(swatch(name)));
      label.append(make("span", group.join(" = ")));
      label.title = group.length > 1 ? `${group.join(", ")}: ${say("these lines coincide; each colour is seen in turn")}` : group[0];
      label.style.left = `${left + view.width() + 4}px`;
      label.style.top = `${top + height}px`;
      label.style.maxWidth = `${place.clientWidth - left - view.width() - 4}px`;
      place.append(label);
    }
  };
  const legendOf = (place) => {
    const about = data.figures[place.dataset.figure].spec.usermeta;
    if (!about) return;
    if (place.previousElementSibling.matches("ul.lines")) place.previousElementSibling.remove();
    if (about.bars || labelled(place)) return;
    const list = make("ul", undefined, "lines");
    const same = sameNow(about);
    for (const label of about.mechanisms.filter((one) => shown.has(one))) {
      const group = same.find((one) => one.includes(label));
      if (!group || group[0] === label) list.append(legendEntry(group || [label]));
    }
    place.before(list);
  };
  const send = (name, value) => {
    signals[name] = value;
    for (const [place, { view, params }] of views) {
      if (!params.has(name)) continue;
      view.signal(name, value);
      const about = data.figures[place.dataset.figure].spec.usermeta;
      if (about && !about.bars) view.signal("dashes", dashesOf(about));
      legendOf(place);
      view.runAsync().then(() => labelEnds(place, view));
    }
  };
  for (const { label } of at("chips") ? data.looks : []) {
    at("chips").append(
      chip(label, shown.has(label), (now) => {
        if (now) shown.add(label);
        else shown.delete(label);
        send("shown", listOfShown());
        listeners.forEach((listener) => listener(shown));
      }),
    );
  }
  for (const choice of document.querySelectorAll("[data-signal]")) {
    signals[choice.dataset.signal] = Number(choice.value);
    choice.addEventListener("change", () => send(choice.dataset.signal, Number(choice.value)));
  }

  // Charts; the interpreter of Vega runs no code from text.
  const tip = at("tip");
  const tooltip = (handler, event, item, value) => {
    tip.hidden = !value;
    if (!value) return;
    tip.textContent = Object.entries(value).map(([key, x]) => `${key}: ${x}`).join("\n");
    tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 12)}px`;
  };
  const theme = (chips) => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const text = { labelColor: colour("--quiet"), titleColor: colour("--ink"), labelFont: "system-ui, sans-serif", titleFont: "system-ui, sans-serif", titleFontWeight: 500 };
    return {
      background: "transparent", view: { stroke: null }, font: "system-ui, sans-serif",
      axis: { ...text, gridColor: colour("--rule"), domainColor: colour("--rule"), tickColor: colour("--rule") },
      legend: { ...text, orient: "bottom", direction: "horizontal", columns: 6, disable: chips },
    };
  };
  const draw = async (place) => {
    const { spec, chips } = data.figures[place.dataset.figure];
    const params = new Set((spec.params || []).map((param) => param.name));
    const config = theme(chips);
    const about = spec.usermeta;
    const hasLines = about && !about.bars;
    if (hasLines) signals.dashes = dashesOf(about);
    const padding = { left: 4, top: 8, bottom: 4, right: hasLines && labelled(place) ? endsRoom(about, place) : 8 };
    const own = { ...spec, padding, autosize: { type: "fit-x", contains: "padding" }, params: (spec.params || []).map((param) => ({ ...param, value: signals[param.name] ?? param.value })) };
    if (own.params.length === 0) delete own.params;
    legendOf(place);
    const { view, finalize } = await vegaEmbed(place, own, { ast: true, actions: false, defaultStyle: false, renderer: "svg", tooltip, config });
    views.set(place, { view, params, finalize });
    for (const name of params) if (name in signals && name !== "dashes") view.signal(name, signals[name]); // they may have changed in the meantime
    if (hasLines) view.signal("dashes", dashesOf(about));
    await view.runAsync();
    labelEnds(place, view);
    place.dataset.drawn = "yes";
  };
  // Those near the window first, then all others one by one, so that print and screenshots have them.
  const places = [...document.querySelectorAll(".vega")];
  const started = new Map();
  const start = (place) => {
    if (!started.has(place)) started.set(place, draw(place));
    return started.get(place);
  };
  const watch = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => start(entry.target)),
    { rootMargin: "400px" },
  );
  places.forEach((place) => watch.observe(place));
  const rest = (k) => {
    if (k < places.length) start(places[k]).then(() => setTimeout(() => rest(k + 1)));
  };
  setTimeout(() => rest(0));
  window.addEventListener("beforeprint", () => places.forEach(start));
  window.unsoftDrawAll = () => Promise.all(places.map(start)).then(() => true);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [place, { finalize }] of [...views]) {
      finalize();
      views.delete(place);
      draw(place);
    }
  });
  window.addEventListener("resize", () => {
    clearTimeout(signals.resized);
    signals.resized = setTimeout(() => views.forEach(({ view }, place) => view.runAsync().then(() => labelEnds(place, view))), 150);
  });
  return { chip, drawn, lookOf, inTurns, legendEntry, onShown };
})();
