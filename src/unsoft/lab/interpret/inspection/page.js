// Maps, patterns and numbers of the chosen head. Texts go through textContent, colours through one custom property.
(() => {
  const { data, at, make, short } = unsoftPage;
  const paint = (element, value, largest) => {
    element.classList.toggle("below", value < 0);
    element.style.setProperty("--v", largest > 0 ? Math.min(Math.abs(value) / largest, 1).toFixed(3) : "0");
  };

  // The map
  const layers = [...new Set(data.heads.map((head) => head.layer))];
  const widest = Math.max(...data.heads.map((head) => head.head)) + 1;
  const buttons = new Map();
  const key = (layer, head) => `${layer}.${head}`;
  const opened = data.heads.find((head) => `${head.layer}.${head.head}` === data.first);
  const chosen = { layer: opened.layer, head: opened.head, token: null };
  const map = at("map");
  const top = make("div");
  top.setAttribute("role", "row");
  top.append(make("span", "layer"));
  for (let head = 0; head < widest; head += 1) {
    const title = make("span", String(head));
    title.setAttribute("role", "columnheader");
    top.append(title);
  }
  map.append(top);
  for (const layer of layers) {
    const row = make("div");
    row.setAttribute("role", "row");
    const title = make("span", String(layer));
    title.setAttribute("role", "rowheader");
    row.append(title);
    for (const head of data.heads.filter((one) => one.layer === layer)) {
      const button = make("button");
      button.type = "button";
      button.tabIndex = -1;
      button.setAttribute("role", "gridcell");
      button.dataset.key = key(layer, head.head);
      buttons.set(button.dataset.key, { button, record: head });
      row.append(button);
    }
    map.append(row);
  }
  const choose = (which, focus) => {
    if (!buttons.has(which)) return;
    const before = buttons.get(key(chosen.layer, chosen.head)).button;
    before.tabIndex = -1;
    before.setAttribute("aria-selected", "false");
    const { button, record } = buttons.get(which);
    chosen.layer = record.layer;
    chosen.head = record.head;
    button.tabIndex = 0;
    button.setAttribute("aria-selected", "true");
    if (focus) button.focus();
    showHead();
  };
  map.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose(button.dataset.key, true);
  });
  map.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const step = steps[event.key];
    const button = event.target.closest("button");
    if (!step || !button) return;
    event.preventDefault();
    const { record } = buttons.get(button.dataset.key);
    const layer = layers[layers.indexOf(record.layer) + step[0]];
    choose(key(layer, record.head + step[1]), true);
  });
  document.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-key]");
    if (row) {
      choose(row.dataset.key, false);
      at("map-title").scrollIntoView();
    }
  });

  // The measure that colours it
  const measure = at("measure");
  for (const column of data.columns) {
    const option = make("option", column.title);
    option.value = column.name;
    measure.append(option);
  }
  measure.value = data.measure;
  const showMeasure = () => {
    const column = data.columns.find((one) => one.name === measure.value);
    const values = data.heads.map((head) => head[column.name]).filter((x) => x !== null && x !== undefined);
    const low = Math.min(...values);
    const high = Math.max(...values);
    const signed = low < 0;
    const largest = Math.max(Math.abs(low), Math.abs(high));
    for (const { button, record } of buttons.values()) {
      const value = record[column.name];
      const known = value !== null && value !== undefined;
      button.classList.toggle("unknown", !known);
      if (known) paint(button, signed ? value : value - low, signed ? largest : high - low);
      const words = `layer ${record.layer} head ${record.head}, ${column.title} ${short(value)}`;
      button.setAttribute("aria-label", words);
      button.title = words;
    }
    at("measure-help").textContent = column.help;
    at("low").textContent = short(signed ? -largest : low);
    at("high").textContent = short(signed ? largest : high);
    document.querySelector(".legend i").classList.toggle("signed", signed);
  };
  measure.addEventListener("change", showMeasure);

  // The pattern of the chosen head. A space before a word only says that it begins one, and would push labels apart.
  const word = (token) => token.trim() || token;
  const sentence = at("sentence");
  const weightsOf = (pattern) => {
    const layer = pattern.layers[chosen.layer];
    const size = pattern.tokens.length;
    const bytes = Int8Array.from(atob(layer.weights), (c) => c.charCodeAt(0));
    const scale = layer.scales[chosen.head] / 127;
    const start = chosen.head * size * size;
    return (row, column) => bytes[start + row * size + column] * scale;
  };
  const showPattern = () => {
    if (!sentence) return;
    const pattern = data.patterns[Number(sentence.value)];
    const size = pattern.tokens.length;
    if (chosen.token === null || chosen.token >= size) chosen.token = size - 1;
    const weight = weightsOf(pattern);
    let largest = 0;
    let causal = true;
    for (let i = 0; i < size; i += 1) {
      for (let j = 0; j < size; j += 1) {
        largest = Math.max(largest, Math.abs(weight(i, j)));
        causal = causal && (j <= i || weight(i, j) === 0);
      }
    }
    const cell = size > 24 ? 15 : 20;
    const grid = make("div");
    grid.id = "pattern";
    grid.style.setProperty("--cell", `${cell}px`);
    grid.style.gridTemplateColumns = `auto repeat(${size}, ${cell}px)`;
    grid.append(make("b", ""));
    pattern.tokens.forEach((token, j) => {
      const label = make("b", word(token), "column");
      label.title = `${j}: ${token}`;
      grid.append(label);
    });
    for (let i = 0; i < size; i += 1) {
      const label = make("b", word(pattern.tokens[i]), "row");
      label.classList.toggle("now", i === chosen.token);
      grid.append(label);
      for (let j = 0; j < size; j += 1) {
        const square = make("i");
        const value = weight(i, j);
        if (causal && j > i) square.classList.add("hidden");
        else paint(square, value, largest);
        square.title = `${pattern.tokens[i]} → ${pattern.tokens[j]}: ${short(value)}`;
        grid.append(square);
      }
    }
    at("pattern").replaceWith(grid);
    const tokens = at("tokens");
    const focused = document.activeElement && document.activeElement.classList.contains("token");
    const row = pattern.tokens.map((_, j) => weight(chosen.token, j));
    const most = Math.max(...row.map(Math.abs));
    tokens.replaceChildren(
      ...pattern.tokens.map((token, j) => {
        const button = make("button", word(token), "token");
        button.type = "button";
        button.setAttribute("aria-pressed", String(j === chosen.token));
        button.setAttribute("aria-label", `${token}, position ${j}, weight ${short(row[j])}`);
        paint(button, row[j], most);
        button.classList.toggle("strong", most > 0 && Math.abs(row[j]) / most > 0.55);
        button.title = short(row[j]);
        button.addEventListener("click", () => {
          chosen.token = j;
          showPattern();
        });
        return button;
      }),
    );
    if (focused) tokens.children[chosen.token].focus();
    const best = row.indexOf(row.reduce((x, y) => (Math.abs(y) > Math.abs(x) ? y : x)));
    at("told").textContent = `“${word(pattern.tokens[chosen.token])}” (position ${chosen.token}) attends most to “${word(pattern.tokens[best])}” (position ${best}): ${short(row[best])}`;
  };
  if (sentence) {
    sentence.addEventListener("change", () => {
      chosen.token = null;
      showPattern();
    });
  }

  const showHead = () => {
    const place = data.heads.findIndex((one) => one.layer === chosen.layer && one.head === chosen.head);
    const record = data.heads[place];
    at("chosen-title").textContent = `Layer ${record.layer}, head ${record.head}`;
    const entries = data.columns.map((column) => [column.title, short(record[column.name]), column.help]);
    entries.push(["sink token", data.tokens[place], "the token that gets most"]);
    if (record.pattern_twin >= 0) entries.push(["twin", `head ${record.pattern_twin}`, "the head of this layer with the most similar patterns"]);
    at("numbers").replaceChildren(
      ...entries.map(([title, value, help]) => {
        const pair = make("div");
        pair.title = help;
        pair.append(make("dt", title), make("dd", value));
        return pair;
      }),
    );
    showPattern();
  };
  at("all-numbers").open = window.matchMedia("(min-width: 1000px)").matches; // there is room beside the pattern
  showMeasure();
  choose(key(chosen.layer, chosen.head), false);
})();
