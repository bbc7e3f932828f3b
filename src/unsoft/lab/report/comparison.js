// Heat maps of the comparison.
(() => {
  const { data, make } = unsoftPage;
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
})();
