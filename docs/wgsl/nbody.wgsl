// A step of bodies that attract each other, for `--halo all`. A row of the input and of the result
// has a place (3), a velocity (3) and a mass.
const STEP = 0.001;
// Square of the distance below which bodies do not attract more: no two are in one place.
const SOFT = 1e-4;
const PART = 128;

fn place(body: i32) -> vec3<f32> {
    return vec3<f32>(x(body, 0), x(body, 1), x(body, 2));
}

fn f(row: i32) -> array<f32, 7> {
    let here = place(row);
    var pull = vec3<f32>(0.0);
    for (var first = 0; first < rows(); first += PART) {
        // Sums of parts first: fewer roundings of large sums.
        var part = vec3<f32>(0.0);
        for (var body = first; body < min(first + PART, rows()); body += 1) {
            let away = place(body) - here;
            let square = dot(away, away) + SOFT;
            part += away * (x(body, 6) / (square * sqrt(square)));
        }
        pull += part;
    }
    let velocity = vec3<f32>(x(row, 3), x(row, 4), x(row, 5)) + STEP * pull;
    let next = here + STEP * velocity;
    return array<f32, 7>(next.x, next.y, next.z, velocity.x, velocity.y, velocity.z, x(row, 6));
}
