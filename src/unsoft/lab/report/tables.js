// Tables whose heads are buttons: a click sorts by that column, a second one the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const body = table.tBodies[table.tBodies.length - 1]; // rows of an earlier body are pinned
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const numeric = [...body.rows].some((row) => row.cells[column].dataset.value !== undefined);
      const now = head.getAttribute("aria-sort");
      // Numbers begin with the largest, words with the first.
      const down = now ? now === "ascending" : numeric;
      const value = (row) => {
        const cell = row.cells[column];
        return numeric ? Number(cell.dataset.value ?? -Infinity) : cell.textContent;
      };
      const sign = down ? -1 : 1;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return sign * (numeric ? x - y : x.localeCompare(y));
      });
      body.append(...rows);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}

// A table that is wider than its frame says so: on a phone nothing else shows that it scrolls.
const frames = [...document.querySelectorAll(".scroll")].filter((frame) => frame.querySelector("table"));
const hint = (frame) => {
  const wide = frame.scrollWidth > frame.clientWidth + 1;
  const before = frame.previousElementSibling;
  const there = before && before.matches(".scroll-hint") ? before : null;
  if (wide && !there) {
    const words = document.createElement("p");
    words.className = "scroll-hint quiet small";
    words.textContent = unsoftPage.say("scroll this table sideways →");
    frame.before(words);
  }
  if (!wide && there) there.remove();
  frame.classList.toggle("more", wide && frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 1);
};
const hintAll = () => frames.forEach(hint);
frames.forEach((frame) => frame.addEventListener("scroll", () => hint(frame), { passive: true }));
document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", hintAll));
window.addEventListener("resize", hintAll);
window.addEventListener("load", hintAll);
