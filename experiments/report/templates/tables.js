"use strict";
// A click on a header sorts by it: numbers with the largest first, then the other way round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const header = button.closest("th");
    const column = header.cellIndex;
    const body = header.closest("table").tBodies[0];
    const rows = [...body.rows];
    const value = (row) => JSON.parse(row.cells[column].dataset.value);
    const before = header.getAttribute("aria-sort");
    const first = header.classList.contains("number") ? "descending" : "ascending";
    const other = first === "descending" ? "ascending" : "descending";
    const order = before === first ? other : first;
    const sign = order === "ascending" ? 1 : -1;
    rows.sort((one, two) => {
      const [a, b] = [value(one), value(two)];
      if (a === null || b === null) return (a === null) - (b === null); // unknown ones last
      if (typeof a === "number" && typeof b === "number") return sign * (a - b);
      return sign * String(a).localeCompare(String(b), "en", { numeric: true });
    });
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    body.append(...rows);
  });
}
