"use strict";
// Tables whose heads are buttons: a click sorts by that column, a second one the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const numeric = [...table.tBodies[0].rows].some((row) => row.cells[column].dataset.value !== undefined);
      const now = head.getAttribute("aria-sort");
      // Numbers begin with the largest, words with the first.
      const down = now ? now === "ascending" : numeric;
      const value = (row) => {
        const cell = row.cells[column];
        return numeric ? Number(cell.dataset.value ?? -Infinity) : cell.textContent;
      };
      const sign = down ? -1 : 1;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return sign * (numeric ? x - y : x.localeCompare(y));
      });
      table.tBodies[0].append(...rows);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}
