// Heat maps of the comparison, the chips' filter, the switches of the scoreboard, copying, and the list of contents.
(() => {
  const { data, at, make, say } = unsoftPage;
  const { onShown } = unsoftCharts;
  const known = new Set(data.looks.map((look) => look.label));

  const drawInto = (place, maps) => {
    place.replaceChildren();
    for (const { label, rows } of maps) {
      const figure = make("figure");
      figure.dataset.mechanism = label;
      const canvas = make("canvas");
      canvas.width = canvas.height = rows.length;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", say("weights of #", label));
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
  window.unsoftMaps = drawInto;
  document.querySelectorAll(".maps:not(#own-map)").forEach((place, k) => drawInto(place, data.maps[k]));
  onShown((shown) => {
    for (const element of document.querySelectorAll(".content [data-mechanism]")) {
      const label = element.dataset.mechanism;
      if (!element.closest("#board")) element.hidden = known.has(label) && !shown.has(label);
    }
  });

  // The scoreboard: values or differences, with or without intervals; the baseline stays below the head.
  const board = at("board");
  for (const name of ["difference", "intervals"]) {
    const box = at(`show-${name}`);
    const take = () => board.classList.toggle(`with-${name}`, box.checked);
    box.addEventListener("change", take);
    take();
  }
  const pin = () => board.style.setProperty("--head", `${board.tHead.offsetHeight}px`);
  new ResizeObserver(pin).observe(board.tHead);

  const copied = async (button, text) => {
    const words = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = say("Copied");
    } catch {
      window.prompt("Copy:", text); // a page that was opened as a file may have no clipboard
    }
    setTimeout(() => (button.textContent = words), 1500);
  };
  window.unsoftCopy = copied;
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => copied(button, button.dataset.copy)));

  // A link opens what is folded around its target.
  const reveal = () => {
    const target = at(decodeURIComponent(window.location.hash.slice(1).split("?")[0]));
    if (!target) return;
    let folded = target.closest("details:not([open])");
    const hidden = folded !== null;
    for (; folded; folded = folded.parentElement.closest("details:not([open])")) folded.open = true;
    const inside = target.querySelector(":scope > details.folded");
    if (inside) inside.open = true;
    if (hidden || inside) target.scrollIntoView();
  };
  window.addEventListener("hashchange", reveal);
  reveal();
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));

  // The list of contents marks the section that is read.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const sections = [...links.keys()].map(at).filter(Boolean);
  const spy = () => {
    const top = window.innerHeight / 3;
    const now = sections.filter((section) => section.getBoundingClientRect().top <= top).pop() || sections[0];
    for (const [name, link] of links) {
      if (name === now.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  sections.sort((a, b) => (a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1));
  window.addEventListener("scroll", spy, { passive: true });
  spy();
})();
