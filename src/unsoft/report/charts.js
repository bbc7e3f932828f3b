// Chips and charts, for every page that has them: the page holds #chips, #tip and places of class "vega".
const unsoftCharts = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  // Chips choose mechanisms, and are the legend of all charts.
  const swatch = (label) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 26 8");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(space, "line");
    const look = data.looks.find((one) => one.label === label) || { colour: "currentColor", dash: [1, 0] };
    for (const [name, value] of Object.entries({ x1: 0, x2: 26, y1: 4, y2: 4, stroke: look.colour, "stroke-width": 3, "stroke-dasharray": look.dash[1] ? look.dash.join(" ") : "none" })) {
      line.setAttribute(name, value);
    }
    svg.append(line);
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
  const send = (name, value) => {
    signals[name] = value;
    for (const { view, params } of views.values()) if (params.has(name)) view.signal(name, value).runAsync();
  };
  for (const { label } of data.looks) {
    at("chips").append(
      chip(label, shown.has(label), (now) => {
        if (now) shown.add(label);
        else shown.delete(label);
        send("shown", listOfShown());
      }),
    );
  }
  for (const choice of document.querySelectorAll("[data-signal]")) {
    signals[choice.dataset.signal] = Number(choice.value);
    choice.addEventListener("change", () => send(choice.dataset.signal, Number(choice.value)));
  }

  // Charts, each drawn when it comes near the window; the interpreter of Vega runs no code from text.
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
    const own = { ...spec, autosize: { type: "fit-x", contains: "padding" }, params: (spec.params || []).map((param) => ({ ...param, value: signals[param.name] ?? param.value })) };
    if (own.params.length === 0) delete own.params;
    const { view, finalize } = await vegaEmbed(place, own, { ast: true, actions: false, defaultStyle: false, renderer: "svg", tooltip, config });
    views.set(place, { view, params, finalize });
    for (const name of params) if (name in signals) view.signal(name, signals[name]); // they may have changed in the meantime
    await view.runAsync();
    place.dataset.drawn = "yes";
  };
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
  window.addEventListener("beforeprint", () => places.forEach(start));
  window.unsoftDrawAll = () => Promise.all(places.map(start)).then(() => true);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [place, { finalize }] of [...views]) {
      finalize();
      views.delete(place);
      draw(place);
    }
  });
  return { data, at, make, chip };
})();
